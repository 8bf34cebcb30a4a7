// The claims table: sort by any column, filter by verdict, kind, area and free text, 25 rows at a time.
// Without this script the page shows the same table in the order of the ledger.
(function () {
  "use strict";
  const NAMES = ["text", "verdict", "kind", "area"];
  const AT_A_TIME = 25;

  function setUp(root) {
    const form = root.querySelector("form");
    const body = root.querySelector("tbody");
    const status = root.querySelector(".ndl-status");
    const rows = Array.from(body.rows);
    const more = document.createElement("p");
    let limit = AT_A_TIME;
    const words = new Map(rows.map((row) => [row, (row.textContent + " " + row.dataset.area).toLowerCase()]));

    // "direction only" and the grounds of a claim that fails are offered among the verdicts; such a claim has its verdict as well
    function matches(row, name) {
      const value = form.elements[name].value;
      return !value || row.dataset[name] === value || (name === "verdict" && row.dataset.only === value);
    }

    function apply() {
      const wanted = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const fits =
          NAMES.slice(1).every((name) => matches(row, name)) &&
          wanted.every((word) => words.get(row).includes(word));
        row.hidden = !fits;
        shown += fits ? 1 : 0;
      }
      status.textContent = shown === rows.length ? rows.length + " claims" : shown + " of " + rows.length + " claims";
      page();
      const query = new URLSearchParams();
      for (const name of NAMES) if (form.elements[name].value) query.set(name, form.elements[name].value);
      const address = (String(query) ? "?" + query : location.pathname) + location.hash;
      try { history.replaceState(null, "", address); } catch (error) { /* a page opened as a file keeps its address */ }
    }

    // of the rows that fit, in the order of the table, those beyond the limit are put off; paper gets them all (style sheet)
    function page() {
      const fitting = Array.from(body.rows).filter((row) => !row.hidden);
      fitting.forEach((row, place) => row.classList.toggle("ndl-later", place >= limit));
      more.hidden = fitting.length <= limit;
      more.firstChild.textContent = "Show " + Math.min(AT_A_TIME, fitting.length - limit) + " more";
      more.lastChild.textContent = "Show all " + fitting.length;
    }

    function extend(to) {
      const first = body.querySelector(".ndl-later:not([hidden])");
      limit = to;
      page();
      first.querySelector(".ndl-id").focus({ preventScroll: true }); // where reading goes on
    }

    function restart() {
      limit = AT_A_TIME;
      apply();
    }

    function key(row, column) {
      const cell = row.cells[column];
      return cell.dataset.sort === undefined ? cell.textContent.trim().toLowerCase() : Number(cell.dataset.sort);
    }

    function sort(header, column) {
      const down = header.getAttribute("aria-sort") === "ascending";
      for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const place = new Map(rows.map((row, index) => [row, index]));
      const order = rows.slice().sort((a, b) => {
        const x = key(a, column), y = key(b, column);
        const by = typeof x === "number" ? x - y : x.localeCompare(y);
        return (down ? -by : by) || place.get(a) - place.get(b);
      });
      body.append(...order);
      limit = AT_A_TIME;
      page();
    }

    more.className = "ndl-more";
    for (const to of [() => limit + AT_A_TIME, () => rows.length]) {
      const button = document.createElement("button");
      button.type = "button";
      button.addEventListener("click", () => extend(to()));
      more.append(button);
    }
    body.parentNode.after(more);

    root.querySelectorAll("th").forEach((header, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = header.textContent;
      button.addEventListener("click", () => sort(header, column));
      header.replaceChildren(button);
    });

    const asked = new URLSearchParams(location.search);
    for (const name of NAMES) if (asked.has(name)) form.elements[name].value = asked.get(name);
    for (const name of NAMES.slice(1)) if (form.elements[name].selectedIndex < 0) form.elements[name].value = "";
    form.addEventListener("input", restart);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(restart));
    form.hidden = false;
    apply();

    function target() {
      try { return document.getElementById(decodeURIComponent(location.hash.slice(1))); } catch (error) { return null; /* "#%" */ }
    }

    function showTarget() {
      const row = target();
      if (!row || !body.contains(row)) return;
      if (row.hidden) { form.reset(); setTimeout(() => reveal(row)); } else reveal(row);
    }

    function reveal(row) {
      if (!row.classList.contains("ndl-later")) return row.scrollIntoView();
      limit = rows.length;
      page();
      row.scrollIntoView();
    }
    window.addEventListener("hashchange", showTarget);
    showTarget();
  }

  document.querySelectorAll(".ndl-claims").forEach(setUp);
})();
