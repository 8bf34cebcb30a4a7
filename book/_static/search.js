// The search: chapters before lists, the chapter about the words first, and excerpts without TeX.
// A chapter's file name says what it is about; here stand other words that readers type.
(function () {
  "use strict";
  const SUBJECTS = {
    10: "algorithm, bias, biases, layer, mode product, parameters, parameter count, example",
    11: "kronecker product, tucker, equivalent dense layer, rank, total bias, redundancy",
    12: "flops, macs, multiply-adds, mode order, compute cost, activation memory, autograd, checkpointing, gpu memory, ram",
    15: "learning rate, lr, adam, sgd, optimizer, optimiser, mup, weight decay, initialization, init, variance, xavier, kaiming",
    20: "vc dimension, expressivity, expressiveness, lower bound, shattering",
    21: "activation, relu, nonlinearity, universal approximation",
    22: "compress, compression, from_linear, svd, sum of kronecker terms, vit, bert",
    23: "von neumann entropy, entanglement, ood, regression",
    24: "rademacher complexity, inductive bias, implicit bias, overfitting",
    33: "hidden size, hidden sizes, axis order",
    34: "axes, shuffle, shuffled pixels, permutation",
    40: "cifar, convolutional network, image classification, vision",
    41: "ett, rnn, time series, transformer",
    42: "uea, ucr",
    43: "boosting, tables, tabular data",
    44: "bert, cola, sst-2, nlp",
    60: "fast, faster, runtime, latency, throughput, time, torch.compile, benchmark, training time, slower",
    63: "onnx, export, autocast, checkpoint, state_dict, compatibility, ddp, fsdp, vmap",
    64: "structured layer, monarch, block-diagonal, low rank, structured matrices, comparison",
    71: "verdicts, results, summary, true, paper, checkpoints, reverse engineering, protocols, reproduce, reproducibility, fid",
    72: "recommendation, advice, when to use, should i use it, use",
  };
  const LISTS = /^book\/(api|bibliography|changelog|claims|contributing|corrections|glossary)$/;
  const plain = (text) => text.toLowerCase().replace(/[\s_-]+/g, " ").trim();
  // a question without what every question has
  const FILLERS = /^(a|an|are|can|do|does|how|i|in|is|it|my|ndlinear|of|should|the|this|to|what|when|where|which|you)$/;
  const asked = plain(new URLSearchParams(location.search).get("q") || "").replace(/[?!.]+$/, "");
  const meant = asked.split(" ").filter((word) => !FILLERS.test(word)).join(" ");

  // 3 where the words are a subject of the chapter, 2 where they stand in its file name, 1 where they are part of a subject
  function fit(page) {
    const [, number, name] = page.match(/^notebooks\/(\d\d)_(\w+)$/) || [];
    if (!number || !meant) return 0;
    const subjects = (SUBJECTS[number] || "").split(", ").map(plain), words = (texts) => new Set(texts.join(" ").split(" "));
    const all = (known) => meant.split(" ").every((word) => known.has(word));
    if (subjects.includes(asked) || subjects.includes(meant)) return 3;
    if (all(words([plain(name)]))) return 2;
    return all(words([plain(name), ...subjects])) ? 1 : 0;
  }

  Scorer.score = ([page, , anchor, , score]) =>
    score + (page.startsWith("notebooks/") ? 50 : 0) - (LISTS.test(page) ? 50 : 0) + (anchor ? 0 : 100 * fit(page));

  // short formulas as they are read, longer ones as an ellipsis
  function formula(element) {
    const text = element.textContent.replace(/^\\[[(]|\\[\])]$/g, "").replace(/\\times\b/g, "×").replace(/[{}$]|\\[,;! ]/g, "").trim();
    element.textContent = text.length > 30 || text.includes("\\") ? "…" : text;
  }

  const toText = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    page.querySelectorAll(".math").forEach(formula);
    // code, its switches, and what is printed as plain text
    page.querySelectorAll("pre, summary, .ndl-footer, .ndl-filter, .ndl-counts, .ndl-take").forEach((element) => element.remove());
    // the buttons above the text and its table of contents
    const article = page.querySelector("article");
    if (article) page.querySelector('[role="main"]').replaceChildren(article);
    return toText(page.documentElement.outerHTML, anchor).replace(/\s+/g, " ");
  };
})();
