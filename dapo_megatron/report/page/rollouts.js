"use strict";

// Filters, sorts and searches the tables of completions. A row's link puts its id into the URL hash,
// and the viewer shows the completion of that id.
const Rollouts = (() => {
  const all = (inside, selector) => [...inside.querySelectorAll(selector)];
  const mounted = []; // {save, restore} of each table

  // Returns the sort key of a cell; null if it has no value.
  const valueOf = (cell) => !cell.classList.contains("num") ? cell.textContent : cell.dataset.value === undefined ? null : Number(cell.dataset.value);

  // Returns whether a cell passes a filter: a select, or one end of a range.
  function passes(cell, control) {
    if (control.matches("select")) return [cell.textContent, ...cell.textContent.split(", ")].includes(control.value);
    const value = valueOf(cell);
    return value !== null && (control.dataset.end === "from" ? value >= control.value : value <= control.value);
  }

  function mountTable(view, openBlob) {
    const body = view.querySelector("tbody");
    const box = view.querySelector("[type=search]");
    const heads = all(view, "th");
    const controls = all(view, "thead select, thead input");
    const rows = [...body.rows];
    const labels = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    let texts = null; // row -> its prompt, truth and answer; null until texts are searched

    function has(row, phrase) {
      const [ticket] = row.cells[0].textContent.split("/");
      if (/^\d+(\/\d+)?$/.test(phrase) && !texts) return [ticket, row.cells[0].textContent].includes(phrase);
      return labels.get(row).includes(phrase) || Boolean(texts?.get(row).includes(phrase));
    }

    function apply() {
      const phrase = box.value.trim().toLowerCase();
      const used = controls.filter((control) => control.value !== "");
      let shown = 0;
      for (const row of rows) {
        row.hidden = !(used.every((control) => passes(row.cells[heads.indexOf(control.closest("th"))], control)) && (!phrase || has(row, phrase)));
        if (!row.hidden) shown++;
        row.querySelector("a").tabIndex = !row.hidden && shown === 1 ? 0 : -1;
      }
      const [some, every] = [shown, rows.length].map((num) => num.toLocaleString("en-US"));
      view.querySelector(".r-count").textContent = `${shown === rows.length ? every : `${some} of ${every}`} completions${texts && phrase ? ", texts searched" : ""}`;
    }

    // Also searches the texts for the phrase in the box, until the box is empty.
    async function searchTexts() {
      if (!box.value.trim()) return;
      const read = new Map();
      for (const id of new Set(rows.map((row) => row.dataset.blob))) {
        const group = await openBlob(id);
        for (const row of rows.filter((candidate) => candidate.dataset.blob === id)) {
          const completion = group.completions.find((candidate) => String(candidate.sample) === row.dataset.sample);
          const answer = completion.text ?? completion.tokens.map((token) => group.pieces[token]).join("");
          read.set(row, [group.prompt, group.truth, answer].join("\n").toLowerCase());
        }
      }
      texts = read;
      apply();
    }

    function sort(head, down) {
      const at = heads.indexOf(head);
      for (const header of heads) header.ariaSort = header !== head ? null : down ? "descending" : "ascending";
      const sign = down ? -1 : 1;
      rows.sort((first, second) => {
        const [a, b] = [valueOf(first.cells[at]), valueOf(second.cells[at])];
        if (a === b) return 0;
        return a === null ? 1 : b === null ? -1 : a < b ? -sign : sign; // cells without a value come last
      });
      body.append(...rows);
      apply();
    }

    for (const control of [box, ...controls]) control.addEventListener("input", () => { if (!box.value) texts = null; apply(); });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter") searchTexts();
      if (event.key === "ArrowDown") body.querySelector("tr:not([hidden]) a")?.focus();
    });
    for (const head of heads) head.querySelector("button").addEventListener("click", () => sort(head, head.ariaSort === "ascending"));
    view.querySelector(".r-clear").addEventListener("click", () => {
      for (const control of [box, ...controls]) control.value = "";
      texts = null;
      apply();
    });
    body.addEventListener("click", (event) => { location.hash = event.target.closest("tr").id; });
    body.addEventListener("keydown", (event) => {
      const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      neighbor(event.target.closest("tr"), by)?.querySelector("a").focus();
    });
    apply();
    return {
      save: () => ({ values: [box, ...controls].map((control) => control.value), sorted: heads.findIndex((head) => head.ariaSort), down: heads.some((head) => head.ariaSort === "descending") }),
      restore({ values, sorted, down }) {
        [box, ...controls].forEach((control, at) => { control.value = values[at] ?? ""; });
        if (heads[sorted]) sort(heads[sorted], down);
        apply();
      },
    };
  }

  // Returns the visible row above or below.
  function neighbor(row, by) {
    const shown = all(row.parentElement, "tr:not([hidden])");
    return shown[shown.indexOf(row) + by];
  }

  function mount(openBlob, kept) {
    const dialog = document.getElementById("viewer");
    const viewer = RolloutViewer.make(dialog);
    const named = () => document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("tr[data-blob]");

    async function open() {
      const row = named();
      if (!row) return;
      const group = await openBlob(row.dataset.blob);
      if (row === named()) viewer.show(row, group);
    }

    function move(by) {
      const next = named() && neighbor(named(), by);
      if (next) location.replace(`#${next.id}`);
    }

    for (const view of all(document, ".rollouts")) mounted.push(mountTable(view, openBlob));
    kept?.tables?.forEach((table, at) => mounted[at]?.restore(table));
    viewer.color(kept?.color);
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

  return { mount, save: () => ({ tables: mounted.map((table) => table.save()), color: document.querySelector("#viewer [name=color]:checked").value }) };
})();
