"use strict";

// Filters, sorts and searches the tables of completions. A row's link puts its id into the URL hash,
// and the viewer shows the completion of that id.
const Rollouts = (() => {
  const all = (inside, selector) => [...inside.querySelectorAll(selector)];

  // Returns the sort key of a cell; null if it has no value.
  const valueOf = (cell) => !cell.classList.contains("num") ? cell.textContent : cell.dataset.value === undefined ? null : Number(cell.dataset.value);

  function mountTable(view, openGroup) {
    const body = view.querySelector("tbody"), box = view.querySelector("[type=search]");
    const heads = all(view, "th"), choices = all(view, "thead select"), rows = [...body.rows];
    const labels = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    let texts = null; // row -> its prompt, truth and answer; null until texts are searched

    function has(row, phrase) {
      const name = row.cells[0].textContent;
      if (/^\d+(\/\d+)?$/.test(phrase) && !texts) return [name.split("/")[0], name].includes(phrase);
      return labels.get(row).includes(phrase) || Boolean(texts?.get(row).includes(phrase));
    }

    function apply() {
      const phrase = box.value.trim().toLowerCase();
      let shown = 0;
      for (const row of rows) {
        const fits = choices.every((choice) => !choice.value || row.cells[heads.indexOf(choice.closest("th"))].textContent === choice.value);
        row.hidden = !(fits && (!phrase || has(row, phrase)));
        if (!row.hidden) shown++;
        row.querySelector("a").tabIndex = !row.hidden && shown === 1 ? 0 : -1;
      }
      view.querySelector(".r-count").textContent = `${shown === rows.length ? "" : `${shown} of `}${rows.length} completions${texts ? ", texts searched" : ""}`;
    }

    // Also searches the texts for the phrase in the box, until the box is empty.
    async function searchTexts() {
      const read = new Map();
      for (const id of new Set(rows.map((row) => row.dataset.group))) {
        const group = await openGroup(id);
        for (const row of rows.filter((candidate) => candidate.dataset.group === id)) {
          const completion = group.completions.find((candidate) => String(candidate.sample) === row.dataset.sample);
          const answer = completion.text ?? completion.tokens.map((token) => group.pieces[token]).join("");
          read.set(row, [group.prompt, group.truth, answer].join("\n").toLowerCase());
        }
      }
      texts = box.value.trim() ? read : null;
      apply();
    }

    function sort(head, down) {
      const at = heads.indexOf(head), sign = down ? -1 : 1;
      for (const header of heads) header.ariaSort = header !== head ? null : down ? "descending" : "ascending";
      rows.sort((first, second) => {
        const [a, b] = [valueOf(first.cells[at]), valueOf(second.cells[at])];
        if (a === b) return 0;
        return a === null ? 1 : b === null ? -1 : a < b ? -sign : sign; // cells without a value come last
      });
      body.append(...rows);
      apply();
    }

    for (const control of [box, ...choices]) control.addEventListener("input", () => { if (!box.value) texts = null; apply(); });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter") searchTexts();
      if (event.key === "ArrowDown") body.querySelector("tr:not([hidden]) a")?.focus();
    });
    for (const head of heads) head.querySelector("button").addEventListener("click", () => sort(head, head.ariaSort === "ascending"));
    body.addEventListener("click", (event) => { location.hash = event.target.closest("tr").id; });
    body.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      neighbor(event.target.closest("tr"), by)?.querySelector("a").focus();
    });
    apply();
  }

  // Returns the visible row above or below.
  function neighbor(row, by) {
    const shown = all(row.parentElement, "tr:not([hidden])");
    return shown[shown.indexOf(row) + by];
  }

  function mount(openGroup) {
    const dialog = document.getElementById("viewer");
    const show = mountViewer(dialog);
    const named = () => document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("tr[data-group]");

    async function open() {
      const row = named();
      if (!row) return;
      const group = await openGroup(row.dataset.group);
      if (row === named()) show(row, group);
    }

    function move(by) {
      const next = named() && neighbor(named(), by);
      if (next) location.replace(`#${next.id}`);
    }

    for (const view of all(document, ".rollouts")) mountTable(view, openGroup);
    addEventListener("hashchange", open);
    for (const button of all(dialog, "[data-move]")) button.addEventListener("click", () => move(Number(button.dataset.move)));
    dialog.addEventListener("close", () => {
      const row = named();
      history.replaceState(null, "", location.href.split("#")[0]);
      row?.querySelector("a").focus();
    });
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (dialog.open && event.key === "j") move(1);
      if (dialog.open && event.key === "k") move(-1);
      if (dialog.open || event.key !== "/" || event.target.closest("input, select, textarea")) return;
      event.preventDefault();
      document.querySelector("[data-run]:not([hidden]) .rollouts [type=search]")?.focus();
    });
    open();
  }

  return { mount };
})();
