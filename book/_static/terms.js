// Chapter 22: a small picture, its nearest sum of R Kronecker products, and its nearest matrix of rank R.
// The pictures and the factors of all terms come from the notebook; this adds up as many as the slider says.
(function () {
  "use strict";
  const sized = (matrix, value) => matrix.map((row, i) => row.map((_, j) => value(i, j)));
  const norm = (matrix) => Math.hypot(...matrix.flat());

  // entry (h₁h₂, d₁d₂) of A ⊗ B, and entry (i, j) of u vᵀ
  const kronecker = ([A, B]) => (i, j) =>
    A[Math.floor(i / B.length)][Math.floor(j / B[0].length)] * B[i % B.length][j % B[0].length];
  const outer = ([u, v]) => (i, j) => u[i] * v[j];

  const sum = (picture, entries) =>
    sized(picture, (i, j) => entries.reduce((total, entry) => total + entry(i, j), 0));
  const error = (picture, fit) => norm(sized(picture, (i, j) => picture[i][j] - fit[i][j])) / norm(picture);

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    made.className = className;
    made.append(...children);
    return made;
  }

  // One square per entry, from black at the picture's smallest entry to white at its largest.
  function draw(canvas, matrix, [low, high]) {
    canvas.width = matrix[0].length;
    canvas.height = matrix.length;
    const context = canvas.getContext("2d");
    matrix.forEach((row, i) => row.forEach((value, j) => {
      const grey = Math.round(255 * Math.min(Math.max((value - low) / (high - low), 0), 1));
      context.fillStyle = "rgb(" + grey + " " + grey + " " + grey + ")";
      context.fillRect(j, i, 1, 1);
    }));
  }

  function setUp(root, number) {
    const examples = JSON.parse(root.dataset.values);
    const names = Object.keys(examples);
    let chosen = names[0];
    const buttons = names.map((name) => {
      const made = element("button", "", name);
      made.type = "button";
      made.addEventListener("click", () => { chosen = name; show(); });
      return made;
    });
    const slider = element("input", "");
    Object.assign(slider, { type: "range", min: 1, max: examples[chosen].kronecker.length, value: 1 });
    slider.id = "ndl-terms-" + number;
    slider.addEventListener("input", () => show());
    const label = element("label", "", "Terms, or rank, R");
    label.htmlFor = slider.id;
    const panels = ["the picture", "Kronecker terms", "low rank"].map((name) => {
      const canvas = element("canvas", ""), caption = element("figcaption", "");
      canvas.setAttribute("role", "img");
      return { name, canvas, caption, figure: element("figure", "", caption, canvas) };
    });
    const say = element("p", "ndl-steps-say");
    say.setAttribute("role", "status");

    function show() {
      const { picture, kronecker: terms, low_rank: ranks } = examples[chosen];
      const R = Number(slider.value), stored = R * terms[0].flat(2).length;
      const fits = [picture, sum(picture, terms.slice(0, R).map(kronecker)), sum(picture, ranks.slice(0, R).map(outer))];
      const ends = [Math.min(...picture.flat()), Math.max(...picture.flat())];
      const errors = fits.map((fit) => error(picture, fit).toFixed(2));
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(names[i] === chosen)));
      panels.forEach(({ name, canvas, caption }, i) => {
        draw(canvas, fits[i], ends);
        caption.textContent = i ? name + ", R = " + R : name;
        canvas.setAttribute("aria-label", i ? caption.textContent + ": relative error " + errors[i] : chosen);
      });
      say.textContent = "Relative error: " + errors[1] + " with " + R + (R > 1 ? " Kronecker terms, " : " Kronecker term, ") +
        errors[2] + " with rank " + R + ". Each stores " + stored + " numbers; the picture has " + picture.flat().length + ".";
    }

    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Four pictures and their fits: choose a picture, and R with the arrow keys on the slider");
    root.replaceChildren(
      element("div", "ndl-steps-bar", ...buttons),
      element("div", "ndl-steps-bar", label, slider),
      element("div", "ndl-terms-fits", ...panels.map(({ figure }) => figure)),
      say);
    root.classList.add("ndl-steps", "ndl-terms");
    show();
  }

  document.querySelectorAll('.ndl-interactive[data-script="terms"]').forEach(setUp);
})();
