// Chapter 34: a picture whose pixels change places, and what the best layer of each kind leaves of it.
// Pictures and errors are computed by the notebook, for each number of moved pixels.
(function () {
  "use strict";
  const WIDTH = 320, HEIGHT = 190, LEFT = 34, RIGHT = 210, TOP = 12, BOTTOM = 160;

  function svg(tag, attributes, text = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    made.textContent = text;
    return made;
  }

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    made.className = className;
    made.append(...children);
    return made;
  }

  // grey values from 0 to 1, row by row
  function picture(rows) {
    const made = svg("svg", { viewBox: `0 0 ${rows[0].length} ${rows.length}`, width: 160, role: "img", "aria-label": "The picture" });
    rows.forEach((row, y) => row.forEach((value, x) => {
      const grey = Math.round(255 * (1 - value));
      made.append(svg("rect", { x, y, width: 1.02, height: 1.02, fill: `rgb(${grey} ${grey} ${grey})` }));
    }));
    return made;
  }

  function chart({ moved, layers }, at) {
    const most = Math.max(...layers.flatMap((layer) => layer.left));
    const x = (k) => LEFT + (RIGHT - LEFT) * moved[k] / moved[moved.length - 1];
    const y = (value) => BOTTOM - (BOTTOM - TOP) * value / most;
    const made = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, role: "img", fill: "currentColor", "font-size": 11,
      "aria-label": "What each layer leaves of the pattern, against the number of moved pixels; the sentence below has the numbers" });
    made.append(svg("path", { d: `M${LEFT} ${TOP}V${BOTTOM}H${RIGHT}`, fill: "none", stroke: "currentColor", "stroke-opacity": 0.5 }),
      svg("path", { d: `M${x(at)} ${TOP}V${BOTTOM}`, stroke: "currentColor", "stroke-dasharray": "2 3" }),
      svg("text", { x: LEFT - 4, y: TOP + 4, "text-anchor": "end" }, Math.round(most) + " %"),
      svg("text", { x: LEFT - 4, y: BOTTOM + 4, "text-anchor": "end" }, "0"),
      svg("text", { x: (LEFT + RIGHT) / 2, y: HEIGHT - 12, "text-anchor": "middle" }, "moved pixels"));
    layers.forEach(({ name, left, colour, dash }) => {
      const points = left.map((value, k) => `${x(k)},${y(value)}`).join(" ");
      made.append(svg("polyline", { points, fill: "none", stroke: colour, "stroke-width": 2, "stroke-dasharray": dash }),
        svg("circle", { cx: x(at), cy: y(left[at]), r: 4, fill: colour }),
        svg("text", { x: RIGHT + 6, y: y(left[left.length - 1]) + 4 }, name));
    });
    return made;
  }

  function setUp(root) {
    const values = JSON.parse(root.dataset.values);
    const { moved, pictures, layers } = values, last = moved.length - 1;
    const drawn = element("div", "ndl-steps-grids"), say = element("p", "ndl-steps-say");
    const slider = element("input", ""), label = element("label", "", "Moved pixels ", slider);
    Object.assign(slider, { type: "range", min: 0, max: last, step: 1, value: 0 });
    const all = element("button", "", "Shuffle all"), none = element("button", "", "Put back");
    say.setAttribute("role", "status");

    function show() {
      const at = Number(slider.value);
      slider.setAttribute("aria-valuetext", `${moved[at]} of ${moved[last]}`);
      drawn.replaceChildren(picture(pictures[at]), chart(values, at));
      const left = layers.map((layer) => `${layer.name} ${layer.left[at].toFixed(0)} %`);
      say.textContent = `${moved[at]} of ${moved[last]} pixels moved. What the best layer leaves of the pattern: ${left.join(", ")}.`;
    }

    const go = (to) => { slider.value = to; show(); };
    slider.addEventListener("input", show);
    [[all, last], [none, 0]].forEach(([button, to]) => {
      button.type = "button";
      button.addEventListener("click", () => go(to));
    });
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Shuffle the pixels");
    root.replaceChildren(element("div", "ndl-steps-bar", label, all, none), drawn, say);
    root.classList.add("ndl-steps");
    show();
  }

  document.querySelectorAll('.ndl-interactive[data-script="shuffle"]').forEach(setUp);
})();
