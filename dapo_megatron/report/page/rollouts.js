"use strict";

// The rollouts: a table that sorts and filters, and a viewer of one completion, or two of a group.
// Texts of the run come in as textContent alone.
const Rollouts = (() => {
  const ROW = 30; // pixels, as in rollouts.css
  const { COLUMNS, HELP, OUTCOMES, CHOICES, RANGES, number, plain, words } = RolloutColumns;

  function make(tag, properties = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name in element && !name.startsWith("aria")) element[name] = value;
      else if (value != null) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  function mount(element, run, openBlob) {
    let rows, order, chosen, top; // top: the first row that is drawn
    let hidden = new Set(); // columns that say the same of every row
    let filter, sort;
    let search = null; // what is looked for in texts: {pattern, found: rows, share: done so far}
    let opening = 0; // how often one was asked for
    const blobs = new Map(); // id -> promise
    const searchTexts = RolloutSearch.make(openBlob);
    const ui = skeleton();
    element.replaceChildren(ui.root, ui.dialog);
    const viewer = RolloutViewer.make(ui.dialog, make, { move: (by) => move(by, true), openAt });

    // ---------------------------------------------------------------- data

    function show(next) {
      run = next;
      const table = run.rollouts;
      ui.root.hidden = !table;
      rows = table ? RolloutColumns.toRows(table) : [];
      filter = { text: "", choices: {}, ranges: {} };
      sort = { name: "step", down: false };
      chosen = 0;
      search = null;
      if (!table) return apply();
      ui.note.textContent = table.note;
      hidden = new Set(new Set(table.rows.source).size > 1 ? [] : ["source"]);
      const widths = COLUMNS.filter(([name]) => !hidden.has(name)).map((column) => column[4]);
      ui.grid.style.setProperty("--columns", widths.join(" "));
      ui.grid.style.setProperty("--width", `${widths.reduce((sum, width) => sum + Number(width.match(/(\d+)px/)[1]), 12)}px`);
      for (const head of ui.head.children) head.hidden = hidden.has(head.dataset.name);
      fillFilters();
      apply();
      openHash();
    }

    // ---------------------------------------------------------------- filter and sort

    function apply() {
      const terms = filter.text.toLowerCase().split(/\s+/).filter(Boolean);
      const choices = Object.entries(filter.choices).filter(([, value]) => value !== "");
      const ranges = Object.entries(filter.ranges).map(([name, [low, high]]) => [name, low === "" ? -Infinity : Number(low), high === "" ? Infinity : Number(high)]);
      const kept = rows[order?.[chosen]];
      order = [];
      for (const row of rows) {
        if (choices.every(([name, value]) => values(row, name).includes(value))
          && ranges.every(([name, low, high]) => row[name] != null && row[name] >= low && row[name] <= high)
          && (search ? search.found.has(row.index) : terms.every((term) => passes(row, term)))) order.push(row.index);
      }
      const { name, down } = sort;
      const sign = down ? -1 : 1;
      order.sort((a, b) => {
        const one = rows[a][name], other = rows[b][name];
        if (one === other) return rows[a].step - rows[b].step || rows[a].ticket - rows[b].ticket || rows[a].sample - rows[b].sample;
        if (one == null || other == null) return one == null ? 1 : -1; // what is not known comes last
        return sign * (one < other ? -1 : 1);
      });
      chosen = Math.max(0, kept ? order.indexOf(kept.index) : 0);
      tell();
      ui.space.style.height = `${order.length * ROW}px`;
      ui.grid.setAttribute("aria-rowcount", order.length + 1);
      for (const head of ui.head.children) {
        head.setAttribute("aria-sort", head.dataset.name !== name ? "none" : down ? "descending" : "ascending");
      }
      top = null;
      draw();
    }

    // How many there are, and how far the search is.
    function tell() {
      const isSearching = search && search.share < 1;
      const [some, all] = [order.length, rows.length].map(number.format);
      ui.count.setAttribute("aria-live", isSearching ? "off" : "polite");
      ui.count.textContent = search ? `${some} of ${all} completions have it in a text${isSearching ? ", so far" : ""}`
        : order.length === rows.length ? `${all} completions` : `${some} of ${all} completions`;
      ui.progress.hidden = !isSearching;
      ui.progress.value = search?.share ?? 0;
      ui.texts.setAttribute("aria-pressed", String(Boolean(search)));
      ui.clear.hidden = order.length === rows.length && !search;
      ui.empty.hidden = order.length > 0;
      ui.empty.textContent = isSearching ? "Looking through the texts …" : search ? "No text has it, among those that pass the other filters."
        : filter.text.trim() ? "No label has it. Enter looks for it in prompts and answers." : "No completion passes the filter.";
    }

    // Rows whose prompt, truth or answer has what is in the box; they come in as they are found.
    function searchIn() {
      if (!filter.text.trim()) return ui.search.focus();
      const mine = search = { pattern: RolloutSearch.pattern(filter.text), found: new Set(), share: 0 };
      const indexes = new Map(rows.map((row) => [`${row.group}/${row.sample}`, row.index]));
      let shown = performance.now();
      fromTop();
      searchTexts([...new Set(run.rollouts.blobs)], mine.pattern, (found, share) => {
        if (search !== mine) return false; // the box has changed meanwhile
        for (const [place, sample] of found) mine.found.add(indexes.get(`${place}/${sample}`));
        mine.share = share;
        if (share < 1 && performance.now() - shown < 200) return true;
        shown = performance.now();
        if (chosen === 0) order = []; // the first one, whichever comes in above it
        apply();
        return true;
      });
    }

    // The first row is the chosen one.
    function fromTop() {
      ui.scroller.scrollTop = 0;
      chosen = 0;
      order = [];
      apply();
    }

    // A number is a ticket, 12/3 a sample of it; words stand anywhere.
    function passes(row, term) {
      const [, ticket, sample] = term.match(/^(?:ticket=)?(\d+)(?:\/(\d+))?$/) ?? [];
      if (ticket && row.ticket === Number(ticket) && (!sample || row.sample === Number(sample))) return true;
      return ticket && (sample || term !== ticket) ? false : row.text.includes(term);
    }

    const values = (row, name) => name === "why" ? row.reasons : [String(row[name])];

    function fillFilters() {
      for (const [name] of CHOICES) {
        const select = ui.filters[name];
        const found = [...new Set(rows.flatMap((row) => values(row, name)))].filter((value) => !value.startsWith("beside ")).sort();
        select.replaceChildren(make("option", { value: "" }, "any"),
          ...found.map((value) => make("option", { value }, OUTCOMES[value] ?? (value === "null" ? "none" : words(value)))));
        select.closest("label").hidden = found.length < 2;
      }
      for (const [name] of RANGES) {
        let [low, high] = [Infinity, -Infinity];
        for (const row of rows) if (row[name] != null) [low, high] = [Math.min(low, row[name]), Math.max(high, row[name])];
        ui.ranges[name][0].placeholder = low <= high ? plain(low) : "";
        ui.ranges[name][1].placeholder = low <= high ? plain(high) : "";
        ui.ranges[name][0].closest("label").hidden = !(low < high);
      }
      writeFilters();
    }

    function writeFilters() {
      ui.search.value = filter.text;
      for (const [name] of CHOICES) ui.filters[name].value = filter.choices[name] ?? "";
      for (const [name] of RANGES) ui.ranges[name].forEach((input, end) => { input.value = filter.ranges[name]?.[end] ?? ""; });
    }

    function readFilters() {
      if (filter.text !== ui.search.value) search = null;
      filter.text = ui.search.value;
      for (const [name] of CHOICES) filter.choices[name] = ui.filters[name].value;
      filter.ranges = {};
      for (const [name] of RANGES) {
        const ends = ui.ranges[name].map((input) => input.value);
        if (ends.some(Boolean)) filter.ranges[name] = ends;
      }
      fromTop();
    }

    // ---------------------------------------------------------------- drawing

    // Only the rows in sight are elements.
    function draw() {
      const first = Math.max(0, Math.floor(ui.scroller.scrollTop / ROW) - 8);
      const num = Math.ceil((ui.scroller.clientHeight || 560) / ROW) + 16;
      if (top === first) return mark();
      top = first;
      const drawn = [];
      for (let place = first; place < Math.min(order.length, first + num); place++) drawn.push(drawRow(place));
      ui.rows.style.transform = `translateY(${first * ROW}px)`;
      ui.rows.replaceChildren(...drawn);
      mark();
    }

    function drawRow(place) {
      const row = rows[order[place]];
      const line = make("div", { className: "r-row", role: "row", id: `rollout-${place}`, "aria-rowindex": place + 2 });
      line.dataset.row = row.index;
      line.dataset.place = place;
      for (const [name, , isNumber, write] of COLUMNS) {
        if (hidden.has(name)) continue;
        const text = write(row[name]);
        const cell = make("span", { role: "gridcell", className: isNumber ? "num" : "" }, text);
        if (!isNumber) cell.title = text;
        if (name === "outcome") cell.classList.add(`r-${row.outcome}`);
        line.append(cell);
      }
      return line;
    }

    function mark() {
      for (const line of ui.rows.children) line.setAttribute("aria-selected", Number(line.dataset.place) === chosen);
      if (order.length) ui.grid.setAttribute("aria-activedescendant", `rollout-${chosen}`);
    }

    function move(by, opens = false) {
      const next = Math.min(Math.max(chosen + by, 0), order.length - 1);
      if (next < 0 || (opens && next === chosen)) return;
      chosen = next;
      const [above, below] = [chosen * ROW, (chosen + 1) * ROW + ui.head.offsetHeight];
      if (above < ui.scroller.scrollTop) ui.scroller.scrollTop = above;
      else if (below > ui.scroller.scrollTop + ui.scroller.clientHeight) ui.scroller.scrollTop = below - ui.scroller.clientHeight;
      draw();
      if (opens) open(rows[order[chosen]]);
    }

    // ---------------------------------------------------------------- opening

    async function open(row, beside = null) {
      const turn = ++opening;
      ui.grid.setAttribute("aria-busy", "true");
      const blob = await cached(run.rollouts.blobs[row.group]);
      ui.grid.removeAttribute("aria-busy");
      if (turn !== opening) return; // another was opened meanwhile, or the viewer closed
      viewer.show(blob, row.group, row.sample, beside, search?.pattern);
      setHash(row.ticket, row.sample, beside);
    }

    // The neighbours of a completion are in its blob: the last few stay.
    function cached(id) {
      const blob = blobs.get(id) ?? openBlob(id);
      blobs.delete(id);
      blobs.set(id, blob);
      if (blobs.size > 3) blobs.delete(blobs.keys().next().value);
      return blob;
    }

    // Another sample of the group that is open.
    function openAt(ticket, sample, beside) {
      const place = order.findIndex((index) => rows[index].ticket === ticket && rows[index].sample === sample);
      if (place >= 0) { chosen = place; move(0); }
      setHash(ticket, sample, beside);
    }

    function setHash(ticket, sample, beside) {
      const hash = `#ticket=${ticket}&sample=${sample}${beside == null ? "" : `&beside=${beside}`}`;
      history.replaceState(null, "", hash);
    }

    function openHash() {
      const asked = new URLSearchParams(location.hash.slice(1));
      if (!asked.has("ticket")) return;
      const [ticket, sample] = [Number(asked.get("ticket")), Number(asked.get("sample") ?? NaN)];
      const row = rows.find((one) => one.ticket === ticket && (one.sample === sample || Number.isNaN(sample)));
      ui.lost.hidden = Boolean(row);
      if (!row) {
        ui.lost.textContent = `Ticket ${asked.get("ticket")} is not among the completions of this page: report it with --ticket.`;
        return;
      }
      chosen = Math.max(0, order.indexOf(row.index));
      move(0);
      open(row, asked.has("beside") ? Number(asked.get("beside")) : null);
    }

    // ---------------------------------------------------------------- elements and listeners

    function skeleton() {
      const found = { filters: {}, ranges: {} };
      found.note = make("p", { className: "muted r-note" });
      found.lost = make("p", { className: "r-lost", hidden: true, role: "status" });
      found.search = make("input", { type: "search", id: "rollout-filter", placeholder: "12, 12/3, a label; Enter: texts  ( / )", "aria-label": "Filter by ticket, sample, set, fate or reason; Enter searches the texts", autocomplete: "off", spellcheck: false });
      found.clear = make("button", { type: "button", hidden: true }, "clear");
      found.texts = make("button", { type: "button", title: "Look for it in prompts, truths and answers (Enter in the box)" }, "search texts");
      found.progress = make("progress", { max: 1, value: 0, hidden: true, "aria-label": "Texts looked through" });
      found.count = make("span", { className: "r-count", role: "status" });
      const choices = CHOICES.map(([name, label]) => make("label", {}, `${label} `, found.filters[name] = make("select")));
      const ranges = RANGES.map(([name, label]) => {
        found.ranges[name] = ["from", "to"].map((end) => make("input", { type: "number", step: "any", "aria-label": `${label} ${end}` }));
        return make("label", {}, `${label} `, found.ranges[name][0], "–", found.ranges[name][1]);
      });
      found.head = make("div", { className: "r-head", role: "row", "aria-rowindex": 1 });
      for (const [name, label, isNumber] of COLUMNS) {
        const head = make("div", { role: "columnheader", className: isNumber ? "num" : "" }, make("button", { type: "button", title: HELP[name] ?? "" }, label));
        head.dataset.name = name;
        found.head.append(head);
      }
      found.rows = make("div", { className: "r-rows", role: "rowgroup" });
      found.space = make("div", { className: "r-space", role: "presentation" }, found.rows);
      found.empty = make("p", { className: "muted r-empty", hidden: true }, "No completion passes the filter.");
      found.scroller = make("div", { className: "r-scroll", role: "presentation" }, found.head, found.space, found.empty);
      found.grid = make("div", { id: "rollout-table", className: "card r-table", role: "grid", tabIndex: 0, "aria-label": "Completions: arrow keys move, Enter opens" }, found.scroller);
      found.dialog = make("dialog", { id: "viewer", "aria-label": "Completion" });
      found.root = make("div", { className: "rollouts" }, found.note, found.lost,
        make("div", { className: "r-filters" }, found.search, found.texts, ...choices, ...ranges, found.clear, found.progress, found.count), found.grid);
      return found;
    }

    function listen() {
      for (const input of [ui.search, ...Object.values(ui.filters), ...Object.values(ui.ranges).flat()]) input.addEventListener("input", readFilters);
      ui.search.addEventListener("keydown", (event) => {
        const looks = event.key === "Enter" && !search && filter.text.trim();
        if (looks) searchIn();
        else if (event.key === "Enter" || event.key === "ArrowDown") { event.preventDefault(); ui.grid.focus(); }
        if (event.key === "Escape") { ui.search.value = ""; readFilters(); ui.grid.focus(); }
      });
      ui.texts.addEventListener("click", () => {
        if (!search) return searchIn();
        search = null;
        fromTop();
      });
      ui.clear.addEventListener("click", () => {
        search = null;
        filter = { text: "", choices: {}, ranges: {} };
        writeFilters();
        apply();
        ui.search.focus();
      });
      ui.head.addEventListener("click", (event) => {
        const name = event.target.closest("[data-name]")?.dataset.name;
        if (!name) return;
        const isNumber = COLUMNS.find((column) => column[0] === name)[2];
        sort = { name, down: sort.name === name ? !sort.down : isNumber && name !== "step" && name !== "ticket" && !name.startsWith("logprob") };
        fromTop();
      });
      ui.scroller.addEventListener("scroll", draw, { passive: true });
      ui.rows.addEventListener("click", (event) => {
        const line = event.target.closest("[data-place]");
        if (!line) return;
        chosen = Number(line.dataset.place);
        mark();
        open(rows[order[chosen]]);
      });
      ui.grid.addEventListener("keydown", (event) => {
        if (event.target !== ui.grid) return;
        const page = Math.max(1, Math.floor(ui.scroller.clientHeight / ROW) - 2);
        const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -order.length, End: order.length };
        if (event.key in steps) { event.preventDefault(); move(steps[event.key]); }
        if (event.key === "Enter" && order.length) { event.preventDefault(); open(rows[order[chosen]]); }
      });
      ui.dialog.addEventListener("close", () => {
        opening++;
        viewer.clear();
        history.replaceState(null, "", location.href.split("#")[0]);
        ui.grid.focus({ preventScroll: true });
      });
      document.addEventListener("keydown", (event) => {
        const isTyping = event.target.closest("input, select, textarea");
        if (event.key !== "/" || isTyping || ui.dialog.open || event.ctrlKey || event.metaKey || ui.root.hidden) return;
        event.preventDefault();
        ui.search.focus();
        ui.search.select();
      });
      window.addEventListener("hashchange", openHash);
      new ResizeObserver(() => { top = null; draw(); }).observe(ui.scroller);
    }

    show(run);
    listen();
    return {
      update: show,
      save: () => ({ filter, texts: Boolean(search), sort, row: order.length ? [rows[order[chosen]].ticket, rows[order[chosen]].sample] : null, scroll: ui.scroller.scrollTop, color: viewer.color() }),
      restore(kept) {
        if (kept.color) viewer.color(kept.color);
        if (!kept.filter || !rows.length) return;
        filter = kept.filter;
        sort = kept.sort ?? sort;
        writeFilters();
        fromTop();
        if (kept.texts) searchIn();
        const place = kept.row ? order.findIndex((index) => rows[index].ticket === kept.row[0] && rows[index].sample === kept.row[1]) : -1;
        if (place >= 0) chosen = place;
        ui.scroller.scrollTop = kept.scroll ?? 0;
        top = null;
        draw();
      },
    };
  }

  return { mount };
})();
