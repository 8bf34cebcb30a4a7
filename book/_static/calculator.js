// The cost calculator: the numbers of lab.costs for two shapes, those of other layers, and foldings under a budget; exact integers.
(function () {
  "use strict";
  const ALL_ORDERS_UP_TO = 4, MOST_MODES = 12, LARGEST = 1000000000n;
  const LARGEST_FOLDED = 1000000000000n, FOLDINGS_SHOWN = 8;
  const product = (numbers) => numbers.reduce((a, b) => a * b, 1n);
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0n);

  // "2800, 8" or "(2800, 8)" or "2800x8" -> [2800n, 8n]; throws an Error that says what to type
  function sizes(text, name) {
    const inside = text.trim().replace(/^[([]\s*/, "").replace(/\s*,?\s*[)\]]$/, "");
    if (!inside) throw new Error("Type the " + name + ": one whole number per axis, for example 32, 32, 32.");
    const parts = inside.split(/\s*[,;x×*]\s*|\s+/i);
    for (const part of parts) {
      if (!/^\d+$/.test(part)) {
        throw new Error((part ? "“" + part + "” is not a size. " : "A size is missing. ") +
          "Type whole numbers with commas between them, for example 32, 32, 32.");
      }
      if (BigInt(part) < 1n) throw new Error("A size is at least 1. An axis that is to vanish gets the size 1.");
      if (BigInt(part) > LARGEST) throw new Error("Type sizes of at most " + group(LARGEST) + ".");
    }
    if (parts.length > MOST_MODES) throw new Error("Type at most " + MOST_MODES + " sizes.");
    return parts.map(BigInt);
  }

  function one(text, name) {
    const numbers = sizes(text, name);
    if (numbers.length > 1) throw new Error("Type one whole number.");
    return numbers[0];
  }

  function permutations(n) {
    if (n === 0) return [[]];
    const all = [];
    (function extend(start) {
      if (start.length === n) { all.push(start); return; }
      for (let k = 0; k < n; k++) if (!start.includes(k)) extend(start.concat(k));
    })([]);
    return all;
  }

  function run(dims, hidden, order) {
    const size = dims.slice();
    let macs = 0n, saved = 0n;
    for (const k of order) {
      saved += product(size);
      macs += product(size) * hidden[k];
      size[k] = hidden[k];
    }
    return { order, macs, saved };
  }

  // stable: ties keep their place
  function sorted(n, before) {
    return Array.from({ length: n }, (_, k) => k).sort((i, j) => (before(i, j) ? -1 : before(j, i) ? 1 : 0));
  }

  function costs(dims, hidden) {
    if (dims.length !== hidden.length) {
      throw new Error("Shape in has " + dims.length + (dims.length === 1 ? " axis" : " axes") + ", shape out has " + hidden.length +
        ". Type one output size per input axis; an axis that is to vanish gets the size 1.");
    }
    const n = dims.length, same = (a, b) => a.order.join() === b.order.join();
    const defined = run(dims, hidden, sorted(n, () => false));
    // 1/D_i - 1/H_i < 1/D_j - 1/H_j, without fractions
    let cheapest = run(dims, hidden, sorted(n, (i, j) =>
      (hidden[i] - dims[i]) * dims[j] * hidden[j] < (hidden[j] - dims[j]) * dims[i] * hidden[i]));
    if (cheapest.macs === defined.macs) cheapest = defined;
    let leanest = run(dims, hidden, sorted(n, (i, j) => hidden[i] * dims[j] < hidden[j] * dims[i]));
    if (leanest.saved === cheapest.saved) leanest = cheapest;
    const names = [["as defined", defined], ["cheapest", cheapest], ["keeps least", leanest]];
    let orders = n <= ALL_ORDERS_UP_TO ? permutations(n).map((order) => run(dims, hidden, order))
      : names.map(([, run]) => run).filter((run, i, all) => all.findIndex((other) => same(other, run)) === i);
    for (const one of orders) one.remark = names.filter(([, run]) => same(run, one)).map(([name]) => name).join(", ");
    // by cost, then by the order of the modes
    const place = (a, b) => { const i = a.order.findIndex((k, at) => k !== b.order[at]); return i < 0 ? 0 : a.order[i] - b.order[i]; };
    orders.sort((a, b) => (a.macs < b.macs ? -1 : a.macs > b.macs ? 1 : place(a, b)));
    const dense = product(dims) * product(hidden);
    return {
      dense: { weights: dense, parameters: dense + product(hidden), macs: dense, saved: product(dims) },
      weights: sum(dims.map((d, k) => d * hidden[k])),
      parameters: sum(dims.map((d, k) => d * hidden[k])) + sum(hidden),
      orders,
    };
  }

  const smaller = (a, b) => (a < b ? a : b), larger = (a, b) => (a > b ? a : b);

  function divisors(n) {
    const low = [], high = [];
    for (let d = 1n; d * d <= n; d++) {
      if (n % d) continue;
      low.push(d);
      if (d * d !== n) high.unshift(n / d);
    }
    return low.concat(high);
  }

  // LoKr's two factors of a size: `factor` and the rest if it divides, else the largest divisor up to it that is not the larger part
  function lokr(size, factor) {
    const part = size % factor === 0n ? factor : divisors(size).filter((d) => d <= factor && d * d <= size).pop();
    return [smaller(part, size / part), larger(part, size / part)];
  }

  // What other layers of the same flat sizes need; weights alone, without biases
  function peers(dims, hidden, factor) {
    const result = costs(dims, hidden), from = product(dims), to = product(hidden);
    const cheapest = result.orders.find((one) => one.remark.includes("cheapest"));
    const rank = smaller(larger(result.weights / (from + to), 1n), smaller(from, to));
    const inside = lokr(from, factor), outside = lokr(to, factor);
    const both = costs(inside, outside);
    return [
      { layer: "NdLinear", weights: result.weights, macs: cheapest.macs },
      { layer: "low rank, " + group(rank), weights: rank * (from + to), macs: rank * (from + to) },
      { layer: "Monarch, the same axes", weights: cheapest.macs, macs: cheapest.macs },
      { layer: "LoKr, (" + inside.join(", ") + ") → (" + outside.join(", ") + ")", weights: both.weights,
        macs: both.orders.find((one) => one.remark.includes("cheapest")).macs },
      { layer: "dense", weights: result.dense.weights, macs: result.dense.macs },
    ];
  }

  // Two-mode foldings of a flat layer with at most `budget` weights: the nearest below the budget first, `most` of them
  function foldings(from, to, budget, most) {
    if (from > LARGEST_FOLDED || to > LARGEST_FOLDED) throw new Error("Foldings are listed for up to " + group(LARGEST_FOLDED) + " entries in and out.");
    const found = [], outs = divisors(to);
    for (const d of divisors(from)) for (const h of outs) {
      const dims = [d, from / d], hidden = [h, to / h];
      // one of two mirror images
      if (dims[0] > dims[1] || (dims[0] === dims[1] && hidden[0] > hidden[1])) continue;
      const weights = dims[0] * hidden[0] + dims[1] * hidden[1];
      if (weights <= budget) found.push({ dims, hidden, weights });
    }
    found.sort((a, b) => (a.weights > b.weights ? -1 : a.weights < b.weights ? 1 : Number(a.dims[0] - b.dims[0])));
    return found.slice(0, most).map((one) => ({ ...one,
      macs: costs(one.dims, one.hidden).orders.find((order) => order.remark.includes("cheapest")).macs }));
  }

  const group = (number) => String(number).replace(/\B(?=(\d{3})+$)/g, ",");

  function percent(part, whole) {
    const ratio = Number((part * 10n ** 12n) / whole) / 1e12;
    if (ratio >= 2) return (ratio < 10 ? ratio.toFixed(2) : Math.round(ratio).toLocaleString("en-US")) + " ×";
    const value = 100 * ratio;
    const nearly = value > 99.9 && value < 100.1 && value !== 100; // say on which side of the dense layer it lies
    return (nearly ? value.toFixed(2) : value >= 10 ? value.toFixed(1) : value >= 0.01 ? value.toPrecision(2) : value > 0 ? "< 0.01" : "0") + " %";
  }

  function row(cells, head) {
    const line = document.createElement("tr");
    cells.forEach((text, column) => {
      const cell = document.createElement(head || column === 0 ? "th" : "td");
      if (head) cell.scope = "col"; else if (column === 0) cell.scope = "row";
      cell.textContent = text;
      line.append(cell);
    });
    return line;
  }

  function setUp(root) {
    const output = root.querySelector(".ndl-result"), status = root.querySelector(".ndl-status");
    const fields = {}, error = {};
    for (const name of ["dims", "hidden", "factor", "budget"]) {
      fields[name] = root.querySelector("#ndl-" + name);
      error[name] = root.querySelector("#ndl-" + name + "-error");
    }

    function complain(name, message) {
      error[name].textContent = message;
      if (message) fields[name].setAttribute("aria-invalid", "true"); else fields[name].removeAttribute("aria-invalid");
    }

    function read(name, words, parse) {
      try { complain(name, ""); return parse(fields[name].value, words); } catch (problem) { complain(name, problem.message); return null; }
    }

    function fill(table, heads, lines) {
      const head = document.createElement("thead"), body = document.createElement("tbody");
      head.append(row(heads, true));
      body.append(...lines);
      table.querySelectorAll("thead, tbody").forEach((part) => part.remove());
      table.append(head, body);
    }

    function showPeers(dims, hidden, factor) {
      const all = peers(dims, hidden, factor), dense = all[all.length - 1];
      fill(root.querySelector(".ndl-peers"), ["layer", "weights", "of dense", "multiply-adds", "of dense"], all.map((peer) =>
        row([peer.layer, group(peer.weights), percent(peer.weights, dense.weights), group(peer.macs), percent(peer.macs, dense.macs)])));
    }

    function showFoldings(from, to, budget) {
      const table = root.querySelector(".ndl-foldings");
      let all = [], note = "";
      try { all = foldings(from, to, budget, FOLDINGS_SHOWN); } catch (problem) { note = problem.message; }
      const lines = all.map((folding) => {
        const line = row([folding.dims.join(", ") + " → " + folding.hidden.join(", "), group(folding.weights), group(folding.macs), ""]);
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = "use";
        button.setAttribute("aria-label", "Use the shapes " + line.cells[0].textContent);
        button.addEventListener("click", () => {
          fields.dims.value = folding.dims.join(", ");
          fields.hidden.value = folding.hidden.join(", ");
          apply();
          fields.dims.focus();
        });
        line.cells[3].append(button);
        return line;
      });
      fill(table, ["shapes", "weights", "multiply-adds", ""], lines);
      root.querySelector("#ndl-none").textContent = note || (all.length ? "" :
        "No two-mode folding of " + group(from) + " → " + group(to) + " has so few weights; where a size is prime, its only folding has an axis of length one.");
    }

    function show(result) {
      const facts = output.querySelector("dl");
      const saving = result.weights === 0n ? "" : percent(result.weights, result.dense.weights);
      facts.replaceChildren();
      for (const [term, text] of [
        ["Weights", group(result.weights) + ", dense " + group(result.dense.weights) + " (" + saving + ")"],
        ["With biases", group(result.parameters) + ", dense " + group(result.dense.parameters)],
        ["Dense layer", group(result.dense.macs) + " multiply-adds, keeps " + group(result.dense.saved) + " entries"],
      ]) {
        const pair = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
        dt.textContent = term; dd.textContent = text; pair.append(dt, dd); facts.append(pair);
      }
      const lines = [];
      for (const one of result.orders) {
        const line = row([one.order.map((k) => k + 1).join(", "), group(one.macs), percent(one.macs, result.dense.macs), group(one.saved)]);
        if (one.remark) {
          const remark = document.createElement("small");
          remark.textContent = " " + one.remark;
          line.cells[0].append(remark);
          line.className = "ndl-notable";
        }
        lines.push(line);
      }
      fill(output.querySelector(".ndl-orders"), ["order of modes", "multiply-adds", "of dense", "entries kept"], lines);
      const best = result.orders.find((one) => one.remark.includes("cheapest"));
      const first = result.orders.find((one) => one.remark.includes("as defined"));
      status.textContent = "Cheapest order: " + best.order.map((k) => k + 1).join(", ") + ", with " + group(best.macs) + " multiply-adds" +
        (first.macs === best.macs ? ", the order as defined." : "; as defined " + group(first.macs) + ".");
    }

    function apply() {
      const dims = read("dims", "shape in", sizes), hidden = read("hidden", "shape out", sizes);
      const factor = read("factor", "factor", one), budget = read("budget", "budget", one);
      let result = null;
      if (dims && hidden) {
        try { result = costs(dims, hidden); } catch (problem) { complain("hidden", problem.message); }
      }
      output.hidden = !result;
      if (!result) { status.textContent = "No result: see the message below the field."; return; }
      show(result);
      if (factor) showPeers(dims, hidden, factor);
      if (budget) showFoldings(product(dims), product(hidden), budget);
      const query = new URLSearchParams({ in: dims.join(","), out: hidden.join(",") });
      if (factor) query.set("factor", factor);
      if (budget) query.set("budget", budget);
      try { history.replaceState(null, "", "?" + query + location.hash); } catch (problem) { /* a page opened as a file keeps its address */ }
    }

    const asked = new URLSearchParams(location.search);
    for (const [key, name] of [["in", "dims"], ["out", "hidden"], ["factor", "factor"], ["budget", "budget"]]) {
      if (asked.has(key)) fields[name].value = asked.get(key);
    }
    root.querySelectorAll("button[data-in]").forEach((button) => button.addEventListener("click", () => {
      fields.dims.value = button.dataset.in;
      fields.hidden.value = button.dataset.out;
      apply();
    }));
    root.querySelectorAll("form").forEach((form) => {
      form.addEventListener("input", apply);
      form.addEventListener("submit", (event) => { event.preventDefault(); apply(); });
    });
    root.hidden = false;
    apply();
  }

  window.ndlCosts = (dims, hidden) => costs(dims.map(BigInt), hidden.map(BigInt));
  window.ndlPeers = (dims, hidden, factor) => peers(dims.map(BigInt), hidden.map(BigInt), BigInt(factor));
  window.ndlFoldings = (from, to, budget, most) => foldings(BigInt(from), BigInt(to), BigInt(budget), most);
  const start = () => document.querySelectorAll(".ndl-calculator").forEach(setUp);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start); else start();
})();
