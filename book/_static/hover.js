// Previews: a link to a chapter, a theorem, a claim or a term shows what is there, on hovering and on keyboard focus. Esc closes it.
// The texts are in previews.js, which is fetched from the book's own folder when the first one is wanted.
(function () {
  "use strict";
  const WAIT = 250; // milliseconds
  const root = new URL(document.documentElement.dataset.content_root || "./", location.href);
  let previews = null, box = null, shownFor = null, timer = 0, awaited = null;

  function load() {
    previews = previews || new Promise((resolve) => {
      const script = document.createElement("script");
      script.src = new URL("_static/previews.js", root);
      script.onload = () => resolve(window.ndlPreviews || {});
      script.onerror = () => resolve({});
      document.head.append(script);
    });
    return previews;
  }

  // "book/theorems#thm-11-1", "notebooks/12_cost_and_order", "claim-…" from either of its places; null for other addresses
  function key(link) {
    const url = new URL(link.href, location.href);
    if (!url.href.startsWith(root.href)) return null;
    const page = url.pathname.slice(root.pathname.length).replace(/\.html$/, "");
    const anchor = url.hash.slice(1);
    if (anchor.startsWith("claim-")) return anchor;
    if (page === "book/claims") return anchor && "claim-" + anchor;
    return page + (anchor && "#" + anchor);
  }

  function hide() {
    clearTimeout(timer);
    if (shownFor) shownFor.removeAttribute("aria-describedby");
    if (box) box.remove();
    box = shownFor = null;
  }

  async function show(link) {
    const html = (await load())[key(link)];
    if (!html || !(link.matches(":hover") || link === document.activeElement)) return;
    const typeset = window.MathJax && window.MathJax.typesetPromise;
    if (!typeset && html.includes('class="math')) return;
    hide();
    box = document.createElement("div");
    box.className = "ndl-preview";
    box.id = "ndl-preview";
    box.setAttribute("role", "tooltip");
    box.innerHTML = html;
    box.addEventListener("mouseleave", hide);
    document.body.append(box);
    shownFor = link;
    link.setAttribute("aria-describedby", box.id);
    put(link);
    if (typeset && html.includes('class="math')) {
      await typeset([box]);
      if (shownFor === link) put(link);
    }
  }

  // below the link, above it where there is no room, never beyond the edges
  function put(link) {
    const at = link.getClientRects()[0], size = box.getBoundingClientRect();
    const left = Math.min(at.left, document.documentElement.clientWidth - size.width - 8);
    const below = at.bottom + size.height < window.innerHeight || at.top < size.height;
    box.style.left = Math.max(left, 8) + window.scrollX + "px";
    box.style.top = (below ? at.bottom : at.top - size.height) + window.scrollY + "px";
  }

  function soon(link) {
    if (!link || link === shownFor) return;
    clearTimeout(timer);
    awaited = link;
    if (key(link)) timer = setTimeout(() => show(link), WAIT);
  }

  const linkAt = (event) => event.target.closest && event.target.closest(".bd-article a[href]:not(.headerlink)");
  if (window.matchMedia("(hover: hover)").matches) {
    document.addEventListener("mouseover", (event) => {
      const link = linkAt(event);
      if (link) return soon(link);
      if (awaited && awaited === document.activeElement && awaited !== shownFor) return; // the keyboard waits for this one
      clearTimeout(timer);
      // from the link into the box, across the line between them
      if (box && !box.contains(event.target)) timer = setTimeout(() => { if (box && !box.matches(":hover")) hide(); }, WAIT);
    });
  }
  document.addEventListener("focusin", (event) => { if (event.target.matches(":focus-visible")) soon(linkAt(event)); });
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
})();
