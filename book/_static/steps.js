// Chapter 10: a layer with two modes, one fibre after the other, and the Kronecker matrix that it equals.
// The numbers start from the notebook's own input, weights and biases.
(function () {
  "use strict";
  const range = (n) => Array.from({ length: n }, (_, i) => i);
  const column = (matrix, j) => matrix.map((row) => row[j]);
  const transpose = (matrix) => matrix[0].map((_, j) => column(matrix, j));
  const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
  const vector = (values) => "(" + values.join(", ") + ")";

  // matrix W (D, H), bias b (H): every row x becomes x W + b
  const rows = (x, W, b) => x.map((row) => b.map((bias, h) => dot(row, column(W, h)) + bias));
  const columns = (x, W, b) => transpose(rows(transpose(x), W, b));

  function compute({ input, weights: [W1, W2], biases: [b1, b2] }) {
    const middle = columns(input, W1, b1);
    const zero = input.map((row) => row.map(() => 0));
    const bias = rows(columns(zero, W1, b1), W2, b2).flat();
    // row (h, g), column (p, q): the factor of each mode
    const matrix = W1[0].flatMap((_, h) => W2[0].map((_, g) =>
      W1.flatMap((first) => W2.map((second) => first[h] * second[g]))));
    return { middle, output: rows(middle, W2, b2), matrix, bias };
  }

  // A grid of numbers. shown(i, j): is the entry known yet? marked(i, j): "from", "to" or "".
  function grid(name, values, { shown = () => true, marked = () => "" } = {}) {
    const table = document.createElement("table");
    table.createCaption().innerHTML = name;
    values.forEach((row, i) => {
      const line = table.insertRow();
      row.forEach((value, j) => {
        const cell = line.insertCell();
        cell.textContent = shown(i, j) ? value : "·";
        if (marked(i, j)) cell.className = "ndl-" + marked(i, j);
      });
    });
    return table;
  }

  // Every step of the figure: the part that it belongs to, its sentence, and the grids that it shows.
  function story(values) {
    const { input, weights: [W1, W2], biases: [b1, b2] } = values;
    const { middle, output, matrix, bias } = compute(values);
    const added = (before, b, name, after) => vector(before) + "; plus b" + name + " = " + vector(b) + " makes " + vector(after);
    const first = range(input[0].length).map((q) => ({
      part: 0,
      say: "Column " + (q + 1) + ": " + vector(column(input, q)) + " times W₁ gives " +
        added(column(middle, q).map((v, h) => v - b1[h]), b1, "₁", column(middle, q)) + ".",
      grids: () => [
        grid("<i>X</i>", input, { marked: (i, j) => (j === q ? "from" : "") }),
        grid("<i>W</i><sub>1</sub>", W1),
        grid("after mode 1", middle, { shown: (i, j) => j <= q, marked: (i, j) => (j === q ? "to" : "") }),
      ],
    }));
    const second = range(middle.length).map((h) => ({
      part: 1,
      say: "Row " + (h + 1) + ": " + vector(middle[h]) + " times W₂ gives " +
        added(output[h].map((v, g) => v - b2[g]), b2, "₂", output[h]) + ".",
      grids: () => [
        grid("after mode 1", middle, { marked: (i) => (i === h ? "from" : "") }),
        grid("<i>W</i><sub>2</sub>", W2),
        grid("<i>Y</i>", output, { shown: (i) => i <= h, marked: (i) => (i === h ? "to" : "") }),
      ],
    }));
    const [D1, H1, D2, H2] = [W1.length, W1[0].length, W2.length, W2[0].length];
    const blocks = range(H1 * D1).map((n) => {
      const h = Math.floor(n / D1), p = n % D1;
      const block = (i, j) => Math.floor(i / H2) * D1 + Math.floor(j / D2);
      return {
        part: 2,
        say: "Block " + (h + 1) + ", " + (p + 1) + " is the entry " + W1[p][h] + " of W₁ᵀ times the whole of W₂ᵀ.",
        grids: () => [
          grid("<i>W</i><sub>1</sub><sup>⊤</sup>", transpose(W1), { marked: (i, j) => (i === h && j === p ? "from" : "") }),
          grid("<i>W</i><sub>2</sub><sup>⊤</sup>", transpose(W2), { marked: () => "from" }),
          grid("<i>W</i><sub>1</sub><sup>⊤</sup> ⊗ <i>W</i><sub>2</sub><sup>⊤</sup>", matrix,
            { shown: (i, j) => block(i, j) <= n, marked: (i, j) => (block(i, j) === n ? "to" : "") }),
        ],
      };
    });
    const upright = (list) => list.map((value) => [value]);
    const last = {
      part: 2,
      say: "The " + matrix.length * matrix[0].length + " entries come from " + (D1 * H1 + D2 * H2) + " numbers. Times the entries of X, " +
        "row by row, plus what the biases have become, they give the entries of Y: the layer is this one dense layer.",
      grids: () => [
        grid("<i>W</i><sub>1</sub><sup>⊤</sup> ⊗ <i>W</i><sub>2</sub><sup>⊤</sup>", matrix),
        grid("vec <i>X</i>", upright(input.flat()), { marked: () => "from" }),
        grid("total bias", upright(bias)),
        grid("vec <i>Y</i>", upright(matrix.map((row, i) => dot(row, input.flat()) + bias[i])), { marked: () => "to" }),
      ],
    };
    return [...first, ...second, ...blocks, last];
  }

  function button(text, press) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.addEventListener("click", press);
    return made;
  }

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    made.className = className;
    made.append(...children);
    return made;
  }

  function setUp(root) {
    const steps = story(JSON.parse(root.dataset.values));
    let at = 0;
    const go = (to) => { at = Math.min(Math.max(to, 0), steps.length - 1); show(); };
    const parts = ["Mode 1: columns", "Mode 2: rows", "As one matrix"].map((name, part) =>
      button(name, () => go(steps.findIndex((step) => step.part === part))));
    const back = button("← Back", () => go(at - 1)), next = button("Next →", () => go(at + 1));
    const place = element("span", "ndl-steps-place"), say = element("p", "ndl-steps-say");
    const grids = element("div", "ndl-steps-grids");
    say.setAttribute("role", "status");

    function show() {
      parts.forEach((one, part) => one.setAttribute("aria-pressed", String(part === steps[at].part)));
      // aria-disabled keeps the focus where a disabled button would lose it
      back.setAttribute("aria-disabled", String(at === 0));
      next.setAttribute("aria-disabled", String(at === steps.length - 1));
      place.textContent = at + 1 + " of " + steps.length;
      say.textContent = steps[at].say;
      grids.replaceChildren(...steps[at].grids());
    }

    root.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: steps.length - 1 }[event.key];
      if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      go(to);
    });
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "The example step by step: left and right arrow keys, Home and End");
    root.replaceChildren(
      element("div", "ndl-steps-bar", ...parts),
      grids,
      say,
      element("div", "ndl-steps-bar", back, place, next));
    root.classList.add("ndl-steps");
    show();
  }

  document.querySelectorAll('.ndl-interactive[data-script="steps"]').forEach(setUp);
})();
