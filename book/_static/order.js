// Chapter 12: the modes of a layer as rows that can be dragged, or moved by buttons, into an order; what each step costs.
// The shapes come from the notebook.
(function () {
  "use strict";
  const range = (n) => Array.from({ length: n }, (_, i) => i);
  const product = (sizes) => sizes.reduce((a, b) => a * b, 1);
  const number = (value) => value.toLocaleString("en");
  const shape = (sizes) => "(" + sizes.join(", ") + ")";
  const total = (steps) => steps.reduce((sum, step) => sum + step.macs, 0);

  // For each step: the entries that it reads, and its multiply-adds, entries read times size written.
  function count({ D, H }, order) {
    const sizes = [...D];
    return order.map((mode) => {
      const reads = product(sizes);
      sizes[mode] = H[mode];
      return { mode, reads, macs: reads * H[mode] };
    });
  }

  // Theorem 12.1: sorted by 1/D - 1/H, which is smaller for i than for j if this difference is negative
  const cheapest = ({ D, H }) => range(D.length).sort((i, j) =>
    (H[i] - D[i]) * D[j] * H[j] - (H[j] - D[j]) * D[i] * H[i]);

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    made.className = className;
    made.append(...children);
    return made;
  }

  function button(text, press) {
    const made = element("button", "", text);
    made.type = "button";
    made.addEventListener("click", press);
    return made;
  }

  function setUp(root) {
    const layers = JSON.parse(root.dataset.values);
    const names = Object.keys(layers);
    let layer = layers[names[0]], order = range(layer.D.length), dragged = null;
    const choices = names.map((name) => button(name, () => {
      layer = layers[name];
      order = range(layer.D.length);
      show();
    }));
    const presets = { "Order 1 to N": () => range(layer.D.length), "Cheapest order": () => cheapest(layer) };
    const bar = Object.keys(presets).map((name) => button(name, () => { order = presets[name](); show(); }));
    const table = element("table", ""), say = element("p", "ndl-steps-say");
    say.setAttribute("role", "status");

    function move(from, to) {
      if (from === null || to < 0 || to >= order.length) return;
      order.splice(to, 0, ...order.splice(from, 1));
      show();
    }

    function row({ mode, reads, macs }, place, most) {
      const name = "mode " + (mode + 1);
      const moves = [["↑", -1, "earlier"], ["↓", 1, "later"]].map(([arrow, by, when]) => {
        const made = button(arrow, () => {
          move(place, place + by);
          // the row is new: the focus goes to the same button of the same mode
          table.querySelector('[aria-label="' + name + " " + when + '"]').focus();
        });
        made.setAttribute("aria-label", name + " " + when);
        made.setAttribute("aria-disabled", String(place + by < 0 || place + by >= order.length));
        return made;
      });
      const length = element("div", "ndl-order-bar");
      length.style.width = 100 * macs / most + "%";
      const cells = [name, layer.D[mode] + " → " + layer.H[mode], number(reads)];
      const line = element("tr", "", ...cells.map((text) => element("td", "", text)),
        element("td", "ndl-order-cost", number(macs), length), element("td", "", ...moves));
      line.draggable = true;
      line.addEventListener("dragstart", (event) => {
        dragged = place;
        event.dataTransfer.setData("text/plain", name);
      });
      line.addEventListener("dragend", () => { dragged = null; });
      line.addEventListener("dragover", (event) => { if (dragged !== null) event.preventDefault(); });
      line.addEventListener("drop", (event) => { event.preventDefault(); move(dragged, place); });
      return line;
    }

    function show() {
      const steps = count(layer, order), cost = total(steps), least = total(count(layer, cheapest(layer)));
      const most = Math.max(...steps.map((step) => step.macs));
      choices.forEach((one, i) => one.setAttribute("aria-pressed", String(layers[names[i]] === layer)));
      const titles = ["mode", "size", "entries read", "multiply-adds", "move"].map((title) => {
        const head = element("th", "", title);
        head.scope = "col";
        return head;
      });
      table.replaceChildren(element("caption", "", "First step on top; rows can be dragged"),
        element("thead", "", element("tr", "", ...titles)),
        element("tbody", "", ...steps.map((step, place) => row(step, place, most))));
      say.textContent = "From " + shape(layer.D) + " to " + shape(layer.H) + " in the order " +
        order.map((mode) => mode + 1).join(", ") + ": " + number(cost) + " multiply-adds, " +
        (cost === least ? "the fewest of all orders." : (cost / least).toFixed(2) + " times the fewest.") +
        " A dense layer takes " + number(product([...layer.D, ...layer.H])) + ".";
      say.classList.toggle("ndl-order-best", cost === least);
    }

    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Modes of a layer: choose a layer, and move its modes into an order");
    root.replaceChildren(
      element("div", "ndl-steps-bar", ...choices),
      table,
      say,
      element("div", "ndl-steps-bar", ...bar));
    root.classList.add("ndl-steps", "ndl-order");
    show();
  }

  document.querySelectorAll('.ndl-interactive[data-script="order"]').forEach(setUp);
})();
