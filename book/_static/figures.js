// Figures can be enlarged: a click on one, or its button, opens it over the page; Esc or a click beside it closes it.
(function () {
  "use strict";
  const SMALLEST = 200; // pixels; what is smaller is an icon
  const WIDEST = 1600;
  let dialog = null;

  function makeDialog() {
    const made = document.createElement("dialog");
    made.className = "ndl-dialog";
    made.setAttribute("aria-label", "Enlarged figure");
    made.innerHTML = '<form method="dialog"><button aria-label="Close the figure">✕ Close</button></form>' +
      '<div class="ndl-dialog-figure" tabindex="0" role="region" aria-label="Figure, scrolls where it is wider than the screen"></div>';
    made.addEventListener("click", (event) => { if (event.target === made) made.close(); });
    document.body.append(made);
    return made;
  }

  function enlarge(image) {
    dialog = dialog || makeDialog();
    const copy = new Image();
    copy.alt = image.alt;
    copy.src = image.currentSrc || image.src;
    // as large as the screen shows whole, and on a phone larger than that: then it scrolls
    const whole = Math.min(window.innerWidth - 48, ((window.innerHeight - 120) * image.naturalWidth) / image.naturalHeight);
    copy.style.width = Math.max(Math.min(whole, WIDEST), 1.2 * image.naturalWidth) + "px";
    dialog.querySelector(".ndl-dialog-figure").replaceChildren(copy);
    dialog.showModal();
  }

  function setUp(image) {
    if (image.closest("a, button, dialog") || image.getBoundingClientRect().width < SMALLEST) return;
    const holder = document.createElement("span"), button = document.createElement("button");
    holder.className = "ndl-figure";
    button.type = "button";
    button.textContent = "⤢";
    button.setAttribute("aria-label", "Enlarge the figure");
    button.addEventListener("click", () => enlarge(image));
    image.addEventListener("click", () => enlarge(image));
    image.replaceWith(holder);
    holder.append(image, button);
  }

  if (typeof HTMLDialogElement === "undefined") return;
  window.addEventListener("load", () => document.querySelectorAll(".bd-article img").forEach(setUp));
})();
