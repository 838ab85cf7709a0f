"use strict";

// One recorded step (report/timeline.py): a row per rank with its phases, below it the requests that
// run on every replica, over the same seconds.
const Timeline = (() => {
  const GUTTER = 92, RIGHT = 12, AXIS = 34, HEADING = 22, TOTAL = 56, LABEL = 12;

  const SWATCH = "display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 9px;";

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const seconds = (value) => `${value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} s`;
  const count = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });

  function make(parent, tag, text = "", className = "") {
    const element = document.createElement(tag);
    if (text) element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
    return element;
  }

  function choice(parent, label, id) {
    const outer = make(parent, "label", label);
    const select = make(outer, "select");
    select.id = id;
    return select;
  }

  function fill(select, options) {
    select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  }

  // Round distances between ticks: 1, 2 or 5 times a power of ten, about eight of them.
  function ticks(begin, end) {
    const rough = (end - begin) / 8;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    const found = [];
    for (let at = Math.ceil(begin / step) * step; at <= end + step / 1e6; at += step) found.push(at);
    return { found, digits: Math.max(0, -Math.floor(Math.log10(step))) };
  }

  // Where everything lies: rows of ranks, then of replicas, then the axis.
  function place(timeline) {
    const rank = Math.max(3, Math.min(20, Math.floor(300 / Math.max(1, timeline.ranks.length))));
    const replicas = timeline.engines?.replicas.length ?? 0;
    const areas = replicas <= 8;
    const replica = areas ? 30 : Math.max(3, Math.min(14, Math.floor(260 / replicas)));
    const ranksTop = HEADING;
    const ranksEnd = ranksTop + rank * timeline.ranks.length;
    const totalTop = replicas ? ranksEnd + HEADING + 8 : ranksEnd;
    const replicasTop = replicas > 1 ? totalTop + TOTAL + 10 : totalTop + (replicas ? TOTAL : 0);
    const replicasEnd = replicas > 1 ? replicasTop + replica * replicas : replicasTop;
    return { rank, replica, replicas, areas, ranksTop, ranksEnd, totalTop, replicasTop, end: replicasEnd };
  }

  class View {
    constructor(canvas) {
      this.canvas = canvas;
      this.context = canvas.getContext("2d");
    }

    draw(timeline, window) {
      const width = this.canvas.parentElement.clientWidth;
      if (!width) return;
      const where = place(timeline);
      const height = where.end + AXIS;
      const scale = devicePixelRatio || 1;
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
      Object.assign(this, { timeline, where, window, width });
      const pen = this.context;
      pen.setTransform(scale, 0, 0, scale, 0, 0);
      pen.clearRect(0, 0, width, height);
      pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
      pen.textBaseline = "middle";
      this.axis();
      pen.save();
      pen.beginPath();
      pen.rect(GUTTER, 0, width - GUTTER - RIGHT, height);
      pen.clip();
      this.ranks();
      if (timeline.engines) this.engines();
      pen.restore();
      this.labels();
    }

    x(at) {
      const [begin, end] = this.window;
      return GUTTER + ((at - begin) / (end - begin)) * (this.width - GUTTER - RIGHT);
    }

    axis() {
      const { context: pen, where } = this;
      const { found, digits } = ticks(...this.window);
      pen.textAlign = "center";
      for (const at of found) {
        const x = Math.round(this.x(at)) + 0.5;
        pen.fillStyle = css("--line");
        pen.fillRect(x - 0.5, HEADING, 1, where.end - HEADING + 5);
        pen.fillStyle = css("--muted");
        pen.fillText(at.toFixed(digits), Math.min(x, this.width - 18), where.end + 15);
      }
      pen.textAlign = "left";
      pen.fillText("seconds", 0, where.end + 15);
    }

    ranks() {
      const { context: pen, where, timeline } = this;
      const gap = where.rank >= 7 ? 2 : where.rank >= 5 ? 1 : 0;
      const colors = timeline.phases.map((phase) => css(`--series-${phase.color}`));
      timeline.ranks.forEach((rank, row) => {
        const y = where.ranksTop + row * where.rank;
        for (const [phase, begin, end] of rank.spans) {
          pen.fillStyle = colors[phase];
          pen.fillRect(this.x(begin), y, Math.max(0.75, this.x(end) - this.x(begin)), where.rank - gap);
        }
      });
    }

    // The sum of all replicas as an area; each of a few as an area too, of many as a strip of heat.
    engines() {
      const { where, timeline: { engines } } = this;
      const total = engines.replicas[0].cells.map((_, cell) => engines.replicas.reduce((sum, one) => sum + one.cells[cell], 0));
      this.area(total, total.reduce((a, b) => Math.max(a, b), 0), where.totalTop, TOTAL);
      if (where.replicas < 2) return;
      engines.replicas.forEach((replica, row) => {
        const y = where.replicasTop + row * where.replica;
        if (where.areas) this.area(replica.cells, engines.most, y, where.replica - 4);
        else this.strip(replica.cells, engines.most, y, where.replica - (where.replica >= 6 ? 1 : 0));
      });
    }

    edge(cell, cells) {
      const { begin, end } = this.timeline.engines;
      return this.x(begin + ((end - begin) * cell) / cells.length);
    }

    area(cells, most, y, height) {
      const pen = this.context;
      pen.fillStyle = css("--line");
      pen.fillRect(this.edge(0, cells), y + height - 1, this.edge(cells.length, cells) - this.edge(0, cells), 1);
      pen.fillStyle = css("--series-0");
      pen.beginPath();
      pen.moveTo(this.edge(0, cells), y + height);
      cells.forEach((value, cell) => {
        const top = y + height - (most ? (value / most) * height : 0);
        pen.lineTo(this.edge(cell, cells), top);
        pen.lineTo(this.edge(cell + 1, cells), top);
      });
      pen.lineTo(this.edge(cells.length, cells), y + height);
      pen.fill();
    }

    strip(cells, most, y, height) {
      const pen = this.context;
      pen.fillStyle = css("--line");
      pen.globalAlpha = 0.5;
      pen.fillRect(this.edge(0, cells), y, this.edge(cells.length, cells) - this.edge(0, cells), height);
      pen.fillStyle = css("--series-0");
      cells.forEach((value, cell) => {
        if (!value || !most) return;
        pen.globalAlpha = 0.12 + 0.88 * (value / most);
        const left = Math.floor(this.edge(cell, cells));
        pen.fillRect(left, y, Math.floor(this.edge(cell + 1, cells)) - left, height);
      });
      pen.globalAlpha = 1;
    }

    labels() {
      const { context: pen, where, timeline } = this;
      pen.textAlign = "left";
      pen.fillStyle = css("--fg");
      pen.fillText(`${count(timeline.ranks.length)} rank${timeline.ranks.length === 1 ? "" : "s"}`, GUTTER, HEADING / 2);
      pen.fillStyle = css("--muted");
      this.rows(timeline.ranks, where.ranksTop, where.rank, (one) => `rank ${one.rank}`, (one) => one.host);
      if (!timeline.engines) return;
      pen.fillStyle = css("--fg");
      pen.fillText(`requests running, on ${count(where.replicas)} replica${where.replicas === 1 ? "" : "s"}`, GUTTER, where.totalTop - 12);
      pen.fillStyle = css("--muted");
      pen.fillText(where.replicas > 1 ? "together" : "replica 0", 0, where.totalTop + TOTAL / 2);
      if (where.replicas > 1) {
        this.rows(timeline.engines.replicas, where.replicasTop, where.replica, (one) => `replica ${one.replica}`, () => "");
      }
    }

    // A label for each row there is room for; of rows too low the first of each host.
    rows(all, top, height, label, host) {
      const pen = this.context;
      let free = top;
      all.forEach((one, row) => {
        const y = top + row * height;
        const changes = row === 0 || host(one) !== host(all[row - 1]);
        const grouped = height < LABEL && host(one) !== "";
        if (grouped && changes && row > 0 && height < LABEL) {
          pen.fillStyle = css("--bg");
          pen.fillRect(GUTTER, y - 0.5, this.width - GUTTER - RIGHT, 1);
          pen.fillStyle = css("--muted");
        }
        if (y < free || (grouped && !changes)) return;
        pen.fillText(grouped ? host(one) : label(one), 0, y + Math.max(height, LABEL) / 2, GUTTER - 8);
        free = y + Math.max(height, LABEL) + (height < LABEL ? 4 : 0);
      });
    }

    // What is under the pointer, in words; "" for nothing.
    said(x, y) {
      const { where, timeline } = this;
      if (!timeline || x < GUTTER || x > this.width - RIGHT) return "";
      const [begin, end] = this.window;
      const at = begin + ((x - GUTTER) / (this.width - GUTTER - RIGHT)) * (end - begin);
      if (y >= where.ranksTop && y < where.ranksEnd) {
        const rank = timeline.ranks[Math.floor((y - where.ranksTop) / where.rank)];
        const span = rank.spans.find(([, from, to]) => at >= from && at <= to);
        const who = `rank ${rank.rank} on ${rank.host}`;
        if (!span) return `${who}: in no phase at ${seconds(at)}`;
        return `${who}: ${timeline.phases[span[0]].label}, ${seconds(span[2] - span[1])} (${seconds(span[1])} to ${seconds(span[2])})`;
      }
      const engines = timeline.engines;
      if (!engines || at < engines.begin || at >= engines.end) return "";
      const cell = (cells) => cells[Math.floor(((at - engines.begin) / (engines.end - engines.begin)) * cells.length)];
      if (y >= where.totalTop && y < where.totalTop + TOTAL) {
        const sum = engines.replicas.reduce((total, one) => total + cell(one.cells), 0);
        return `${count(sum)} requests running at ${seconds(at)}`;
      }
      const row = Math.floor((y - where.replicasTop) / where.replica);
      if (where.replicas < 2 || y < where.replicasTop || row >= where.replicas) return "";
      return `replica ${engines.replicas[row].replica}: ${count(cell(engines.replicas[row].cells))} requests running at ${seconds(at)}`;
    }
  }

  // What the phases take, over the ranks; the colours' legend at the same time.
  function table(parent, timeline) {
    const made = make(parent, "table");
    const head = make(make(made, "thead"), "tr");
    for (const text of ["phase", "mean", "shortest", "longest", "longest on"]) make(head, "th", text).scope = "col";
    const body = make(made, "tbody");
    for (const phase of timeline.phases) {
      const row = make(body, "tr");
      const name = make(row, "td");
      make(name, "span").style.cssText = `${SWATCH} background: var(--series-${phase.color});`;
      name.append(phase.label);
      for (const text of [seconds(phase.mean), seconds(phase.least), seconds(phase.most)]) make(row, "td", text);
      make(row, "td", phase.most - phase.least > 0.02 * timeline.seconds ? `rank ${phase.slowest}` : "all alike");
    }
  }

  function mount(element, first) {
    element.replaceChildren();
    const card = make(element, "div", "", "card");
    const heading = make(card, "div", "", "heading");
    make(heading, "h3", "Timeline of one step");
    const tools = make(heading, "div", "", "tools");
    const step = choice(tools, "Step", "timeline-step");
    const part = choice(tools, "Show", "timeline-part");
    const help = make(card, "p", "Who did what when. Each row is a rank (one process, as a rule one GPU), each colour a phase; below, how many " +
      "requests the engines had running. A long thin tail is engines waiting for a few long answers.", "muted");
    help.style.cssText = "font-size: 13.5px; margin: 3px 0 8px;";
    const note = make(card, "p", "", "muted");
    const sentences = make(card, "ul");
    sentences.style.cssText = "padding-left: 20px;";
    const frame = make(card, "div");
    frame.style.cssText = "position: relative; margin: 10px 0;";
    const canvas = make(frame, "canvas");
    canvas.style.cssText = "width: 100%; display: block;";
    canvas.setAttribute("role", "img");
    const tip = make(frame, "div", "", "card");
    tip.style.cssText = "position: absolute; padding: 3px 9px; font-size: 13px; pointer-events: none; white-space: nowrap;";
    tip.hidden = true;
    const legend = make(card, "div");
    const view = new View(canvas);
    let run = first;

    const chosen = () => (step.value === "" ? undefined : run.timelines[Number(step.value)]);

    function draw() {
      const timeline = chosen();
      if (!timeline) return;
      const whole = [0, Math.max(timeline.seconds, timeline.engines?.end ?? 0, 1e-3)];
      const zoomed = part.value === "generate" && timeline.engines;
      view.draw(timeline, zoomed ? [timeline.engines.begin, timeline.engines.end] : whole);
    }

    function show() {
      const timeline = chosen();
      sentences.replaceChildren();
      legend.replaceChildren();
      for (const one of [frame, sentences, legend, tools]) one.hidden = !timeline;
      note.textContent = run.timeline_note ?? "";
      note.hidden = !run.timeline_note;
      element.dataset.step = timeline?.step ?? "";
      if (!timeline) return;
      for (const one of timeline.sentences) make(sentences, "li", one);
      canvas.setAttribute("aria-label", `Timeline of step ${timeline.step}. ${timeline.sentences.join(" ")}`);
      table(legend, timeline);
      draw();
    }

    function update(next) {
      const before = chosen()?.step;
      run = next;
      fill(step, run.timelines.map((one, place) => [String(place), `${one.step} (${seconds(one.seconds)})`]));
      const same = run.timelines.findIndex((one) => one.step === before);
      if (run.timelines.length) step.value = String(same >= 0 ? same : run.timelines.length - 1);
      show();
    }

    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const x = event.clientX - box.left, y = event.clientY - box.top;
      tip.textContent = view.said(x, y);
      tip.hidden = !tip.textContent;
      tip.style.left = `${Math.max(0, Math.min(x + 14, box.width - tip.offsetWidth - 2))}px`;
      tip.style.top = `${y + 16}px`;
    });
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
    step.addEventListener("change", show);
    part.addEventListener("change", draw);
    new ResizeObserver(draw).observe(frame);
    fill(part, [["step", "the whole step"], ["generate", "generation"]]);
    update(run);
    return {
      update,
      theme: draw,
      save: () => ({ step: chosen()?.step ?? null, part: part.value }),
      restore(kept) {
        const found = run.timelines.findIndex((one) => one.step === kept.step);
        if (found >= 0) step.value = String(found);
        part.value = kept.part === "generate" ? "generate" : "step";
        show();
      },
    };
  }

  return { mount };
})();
