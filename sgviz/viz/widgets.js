// The live views: one module for the notebook (anywidget) and for the page /viz. It draws what Python folded and
// computes no number of its own. Views arrive as JSON (sgviz/viz/views/models.py); a user's wishes go back.

const FONT = "12px system-ui, sans-serif";
const SMALL = "10px system-ui, sans-serif";
const PHASES = ["tokenize", "queue", "prefill", "decode", "output"];
const SIDE_PHASES = ["bootstrap", "prealloc", "transfer"]; // of a server that only prefills or only decodes
const STEP_COLOURS = { match: "prefill", split: "queue", insert: "decode", lock: "protected", unlock: "evictable", evict: "alert" };
const FADE_MS = 700;
const PACE_MS = 100;

const CSS = `
.sgviz { color: var(--text); background: var(--ground); font: ${FONT}; padding: 8px; box-sizing: border-box;
  container-type: inline-size; }
.sgviz * { box-sizing: border-box; }
.sgviz .bar { display: flex; gap: 8px; align-items: center; flex-wrap: wrap; margin: 2px 0 6px; color: var(--muted); }
.sgviz .bar input[type=range] { flex: 1; min-width: 120px; accent-color: var(--prefill); }
.sgviz button, .sgviz select, .sgviz input[type=text], .sgviz input[type=number] { font: inherit; color: var(--text);
  background: var(--free); border: 1px solid var(--grid); border-radius: 4px; padding: 3px 9px; }
.sgviz button { cursor: pointer; } .sgviz button:disabled { opacity: .45; cursor: default; }
.sgviz button.on { border-color: var(--prefill); }
.sgviz .tiles { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 8px; }
.sgviz .tile { border: 1px solid var(--grid); border-radius: 6px; padding: 5px 8px; flex: 0 0 84px; min-width: max-content; }
.sgviz .tile b { display: block; font-size: 17px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.sgviz .tile span, .sgviz .note { color: var(--muted); font-size: 11px; }
.sgviz .note.bad { color: var(--alert); }
.sgviz h3 { font-size: 12px; margin: 8px 0 3px; font-weight: 600; }
.sgviz canvas { display: block; width: 100%; }
.sgviz .legend { display: flex; gap: 12px; flex-wrap: wrap; color: var(--muted); font-size: 11px; margin: 3px 0; }
.sgviz .legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 4px; vertical-align: -1px;
  border: 1px solid var(--grid); }
.sgviz .scroll { overflow: auto; max-height: 380px; }
.sgviz .two { display: grid; grid-template-columns: minmax(0, 1fr) 230px; gap: 10px; }
.sgviz .steps div { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; cursor: pointer; padding: 1px 4px; font-size: 11px;
  border-left: 3px solid; margin-bottom: 1px; }
.sgviz pre { white-space: pre-wrap; font-size: 11px; margin: 6px 0; max-height: 300px; overflow: auto; }
.sgviz details { border-left: 3px solid var(--prefill); padding: 1px 8px; margin: 2px 0; }
.sgviz summary { cursor: pointer; } .sgviz summary em { color: var(--muted); font-style: normal; float: right; }
.sgviz table { border-collapse: collapse; font-size: 11px; } .sgviz td, .sgviz th { text-align: left; padding: 1px 10px 1px 0; vertical-align: top; }
.sgviz td { overflow-wrap: anywhere; } .sgviz th { white-space: nowrap; }
.sgviz th { color: var(--muted); font-weight: normal; }
@container (max-width: 640px) { .sgviz .two { grid-template-columns: minmax(0, 1fr); } .sgviz .steps { max-height: 150px; } }
.sgviz .knobs { display: grid; grid-template-columns: max-content minmax(80px, 1fr) 64px; gap: 4px 10px; align-items: center;
  margin-bottom: 8px; max-width: 620px; }
.sgviz .knobs input[type=range] { width: 100%; accent-color: var(--prefill); } .sgviz .knobs .off { opacity: .4; }
.sgviz .knobs output { font-variant-numeric: tabular-nums; text-align: right; }
.sgviz .panes { display: grid; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); gap: 4px 16px; }
`;

// ------------------------------------------------------------ small tools

function make(tag, parent, props = {}) {
  const node = document.createElement(tag);
  const { dataset, style, ...rest } = props;
  Object.assign(node, rest);
  Object.assign(node.dataset, dataset || {});
  Object.assign(node.style, style || {});
  if (parent) parent.appendChild(node);
  return node;
}

/** A wish laid over what was wanted before; a place without a clock is a number of events. */
const wishFor = (wanted, patch) => Object.assign(wanted, "at" in patch ? { clock: "event" } : {}, patch);
/** `act` at once, but at most ten times a second however often it is asked for; `cancel` forgets what is due. */
function paced(act) {
  let timer = null, last = -PACE_MS;
  const run = () => {
    timer = null;
    last = performance.now();
    act();
  };
  const ask = () => {
    const wait = last + PACE_MS - performance.now();
    if (!timer && wait <= 0) run(); else timer = timer || setTimeout(run, wait);
  };
  ask.cancel = () => { clearTimeout(timer); timer = null; };
  return ask;
}

const whole = (n) => Math.round(n).toLocaleString("en-US");
const short = (rid) => (rid.length <= 14 ? rid : "…" + rid.slice(-13));
const clock = (ms) => (ms >= 10000 ? (ms / 1000).toFixed(2) + " s" : ms.toFixed(1) + " ms");

function isDark(el) {
  const lab = document.body && document.body.dataset.jpThemeLight;
  if (lab !== undefined) return lab === "false";
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
}

function hueOf(name) {
  let hash = 7;
  for (const letter of name) hash = (hash * 31 + letter.charCodeAt(0)) >>> 0;
  return (hash * 137.508) % 360;
}

/** A canvas of `height` CSS pixels, sharp on every screen; returns its context and width. */
function surface(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(60, canvas.clientWidth || 600);
  const wide = Math.round(width * ratio), high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.height = height + "px";
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = SMALL;
  pen.textBaseline = "middle";
  return [pen, width];
}

function legend(parent, entries) {
  const box = make("div", parent, { className: "legend" });
  for (const [label, colour] of entries) {
    const item = make("span", box);
    make("i", item, { style: { background: colour.includes("(") ? colour : `var(--${colour})` } });
    item.append(label);
  }
  return box;
}

// ------------------------------------------------------------ dashboard

const TILES = [
  ["running", "running"], ["waiting", "queued"], ["retracted", "retractions"], ["per_second", "tokens/s"],
  ["ttft_ms", "TTFT ms (median)"], ["itl_ms", "ITL ms (median)"], ["ended", "ended"], ["free", "KV free"],
  ["evictable", "KV evictable"], ["protected", "KV protected"], ["private_total", "KV private"],
  ["trace_ns", "µs an event costs"], ["dropped", "events dropped"],
];

function tileText(name, value) {
  if (value === null) return "–";
  if (name === "trace_ns") return (value / 1000).toFixed(2);
  if (name.endsWith("_ms")) return value.toFixed(1);
  return whole(value);
}

class Dashboard {
  constructor(el, ctx) {
    this.ctx = ctx;
    const tiles = make("div", el, { className: "tiles" });
    this.numbers = {};
    for (const [name, label] of TILES) {
      const tile = make("div", tiles, { className: "tile" });
      this.numbers[name] = make("b", tile, { textContent: "–", dataset: { n: name } });
      make("span", tile, { textContent: label });
    }
    make("h3", el, { textContent: "KV tokens" });
    this.kv = make("canvas", el, { dataset: { canvas: "kv-bar" } });
    legend(el, [["protected", "protected"], ["private", "private"], ["evictable", "evictable"], ["free", "free"]]);
    this.speed = make("h3", el, { textContent: "Requests running and queued, tokens per second" });
    this.lines = make("canvas", el, { dataset: { canvas: "lines" } });
    legend(el, [["running", "decode"], ["queued", "queue"], ["tokens/s (own scale)", "output"]]);
    make("h3", el, { textContent: "Batches on the device: a bar's height is its number of requests" });
    this.strip = make("canvas", el, { dataset: { canvas: "strip" } });
    legend(el, [["extend", "prefill"], ["decode", "decode"], ["mixed", "mixed"]]);
    this.lanesTitle = make("h3", el, { textContent: "Requests: click one for its explanation" });
    this.lanes = make("canvas", el, { dataset: { canvas: "lanes" }, style: { cursor: "pointer" } });
    this.names = legend(el, PHASES.map((name) => [name, name]));
    this.lanes.onclick = (event) => this.click(event);
  }

  draw(view, colours) {
    const board = view.dashboard;
    if (!board) return;
    for (const [name] of TILES) this.numbers[name].textContent = tileText(name, board.numbers[name]);
    this.drawKv(board.numbers, colours);
    this.drawLines(board.samples, colours);
    this.drawStrip(board.batches, colours);
    this.drawLanes(board, colours);
  }

  drawKv(n, colours) {
    const [pen, width] = surface(this.kv, 22);
    let x = 0;
    for (const [value, name] of [[n.protected, "protected"], [n.private_total, "private"], [n.evictable, "evictable"], [n.free, "free"]]) {
      const w = n.total ? (value / n.total) * width : 0;
      pen.fillStyle = colours[name];
      pen.fillRect(x, 0, w, 22);
      pen.fillStyle = name === "free" || name === "evictable" ? colours.text : colours.ground;
      const label = `${whole(value)}`;
      if (w > pen.measureText(label).width + 8) pen.fillText(label, x + 5, 11);
      x += w;
    }
  }

  drawLines(samples, colours) {
    const [pen, width] = surface(this.lines, 92);
    const left = 30, base = 80;
    pen.strokeStyle = colours.grid;
    pen.strokeRect(left, 6, width - left - 4, base - 6);
    if (samples.length < 2) return;
    const first = samples[0][0], span = Math.max(1, samples[samples.length - 1][0] - first);
    const most = Math.max(1, ...samples.map((s) => Math.max(s[1], s[2])));
    const fastest = Math.max(1, ...samples.map((s) => s[7]));
    pen.fillStyle = colours.muted;
    pen.fillText(String(most), 4, 10);
    pen.fillText("0", 4, base - 4);
    pen.fillText(clock(first), left, base + 7);
    const end = clock(first + span);
    pen.fillText(end, width - pen.measureText(end).width - 4, base + 7);
    for (const [index, top, colour] of [[7, fastest, "output"], [2, most, "queue"], [1, most, "decode"]]) {
      pen.strokeStyle = colours[colour];
      pen.lineWidth = 1.6;
      pen.beginPath();
      samples.forEach((s, i) => {
        const x = left + ((s[0] - first) / span) * (width - left - 4);
        const y = base - (s[index] / top) * (base - 10);
        if (i) pen.lineTo(x, y); else pen.moveTo(x, y);
      });
      pen.stroke();
    }
    this.speed.textContent = `Requests running and queued, tokens per second (at most ${whole(fastest)})`;
  }

  drawStrip(batches, colours) {
    const [pen, width] = surface(this.strip, 56);
    if (!batches.length) return;
    const begin = batches[0][2];
    const end = Math.max(...batches.map((b) => b[3] || b[2] + 1));
    const most = Math.max(1, ...batches.map((b) => b[4])), scale = width / Math.max(1, end - begin);
    for (const [, mode, start, stop, members] of batches) {
      const high = 4 + (members / most) * 36;
      pen.fillStyle = colours[mode === "extend" ? "prefill" : mode] || colours.muted;
      pen.globalAlpha = stop ? 1 : 0.5;
      pen.fillRect((start - begin) * scale, 42 - high, Math.max(1, ((stop || end) - start) * scale - 0.5), high);
    }
    pen.globalAlpha = 1;
    pen.fillStyle = colours.muted;
    pen.fillText(clock(begin), 0, 50);
    const label = `up to ${most} requests in a batch · ${clock(end)}`;
    pen.fillText(label, width - pen.measureText(label).width, 50);
  }

  drawLanes(board, colours) {
    const lanes = board.lanes, row = 13, left = 108;
    this.shown = lanes;
    this.nameSides(lanes);
    this.row = row;
    const hidden = board.hidden ? `; ${board.hidden} more are not shown` : "";
    this.lanesTitle.textContent = `Requests: click one for its explanation${hidden}`;
    const [pen, width] = surface(this.lanes, Math.max(1, lanes.length) * row + 14);
    if (!lanes.length) return;
    const now = board.numbers.t_ms;
    const begin = Math.min(...lanes.map((lane) => (lane.phases.length ? lane.phases[0][1] : now)));
    const end = Math.max(now, begin + 1);
    const scale = (width - left - 4) / (end - begin);
    lanes.forEach((lane, i) => {
      pen.fillStyle = lane.rid === this.ctx.wanted.rid ? colours.prefill : lane.done ? colours.muted : colours.text;
      pen.fillText(short(lane.rid), 2, i * row + row / 2);
      for (const [name, start, stop] of lane.phases) {
        pen.fillStyle = colours[name];
        pen.fillRect(left + (start - begin) * scale, i * row + 2, Math.max(1, ((stop || end) - start) * scale), row - 4);
      }
      if (lane.retractions) {
        pen.fillStyle = colours.alert;
        pen.fillText("↺" + lane.retractions, left - 22, i * row + row / 2);
      }
    });
    pen.fillStyle = colours.muted;
    pen.fillText(clock(begin), left, lanes.length * row + 7);
    const label = clock(end);
    pen.fillText(label, width - pen.measureText(label).width, lanes.length * row + 7);
  }

  /** The phases of one side are named once some request had one. */
  nameSides(lanes) {
    if (this.sided || !lanes.some((lane) => lane.phases.some(([name]) => SIDE_PHASES.includes(name)))) return;
    this.sided = true;
    const all = legend(null, [PHASES[0], ...SIDE_PHASES, ...PHASES.slice(1)].map((name) => [name, name]));
    this.names.replaceWith(all);
  }

  click(event) {
    const lane = this.shown && this.shown[Math.floor(event.offsetY / this.row)];
    if (lane) this.ctx.wish({ rid: lane.rid });
  }
}

// ------------------------------------------------------------ the KV map

class KvMap {
  constructor(el, ctx) {
    const bar = make("div", el, { className: "bar" });
    bar.append("coloured by ");
    this.by = make("select", bar);
    for (const name of ["state", "owner", "age"]) make("option", this.by, { value: name, textContent: name });
    this.note = make("span", bar, { className: "note", dataset: { n: "kv-note" } });
    this.canvas = make("canvas", el, { dataset: { canvas: "kv-map" } });
    legend(el, [["private", "private"], ["in the tree, locked", "protected"], ["in the tree, evictable", "evictable"],
      ["free", "free"], ["mark: just evicted or retracted", "alert"]]);
    this.hover = make("div", el, { className: "note", textContent: "point at a cell" });
    this.by.onchange = () => this.last && this.draw(...this.last);
    this.canvas.onmousemove = (event) => this.point(event);
  }

  draw(view, colours) {
    const map = view.kv;
    if (!map) return;
    this.last = [view, colours];
    const cells = Math.ceil(map.pages / map.pages_per_cell);
    const width = Math.max(60, this.canvas.clientWidth || 600);
    const size = Math.max(3, Math.min(18, Math.floor(Math.sqrt((width * 260) / Math.max(1, cells)))));
    const columns = Math.max(1, Math.floor(width / size));
    const [pen] = surface(this.canvas, Math.max(1, Math.ceil(cells / columns)) * size);
    Object.assign(this, { map, size, columns, cells: [] });
    let at = 0;
    for (let i = 0; i < map.runs.length; i += 4) {
      const [length, state, owner, age] = map.runs.slice(i, i + 4);
      pen.fillStyle = this.colour(map.states[state], map.owners[owner][0], age, colours);
      for (let k = 0; k < length; k++, at++) {
        this.cells.push([state, owner, age]);
        this.cell(pen, at);
      }
    }
    pen.fillStyle = colours.alert;
    for (const [, hit] of map.flashes) for (const cell of hit) this.cell(pen, cell, 0.3);
    const per = map.pages_per_cell > 1 ? `, a cell is ${map.pages_per_cell} pages` : "";
    const sure = map.exact ? "" : " · events were lost, owners are uncertain";
    this.note.textContent = `${whole(map.pages)} pages of ${map.page_size}${per} · evicted ${whole(map.evicted)}, ` +
      `retracted ${whole(map.retracted)} tokens so far${sure}`;
    this.note.classList.toggle("bad", !map.exact);
  }

  /** A cell, or with `inset` a mark inside it that leaves its colour visible. */
  cell(pen, at, inset = 0) {
    const side = this.size - (this.size > 5 ? 1 : 0), edge = inset * side;
    const x = (at % this.columns) * this.size, y = Math.floor(at / this.columns) * this.size;
    pen.fillRect(x + edge, y + edge, side - 2 * edge, side - 2 * edge);
  }

  colour(state, owner, age, colours) {
    if (state === "free") return colours.free;
    if (state === "gone") return colours.ground;
    if (this.by.value === "state") return colours[state];
    if (this.by.value === "owner") return `hsl(${hueOf(owner)} 55% 55%)`;
    return `hsl(212 70% ${35 + age * 7}%)`;
  }

  point(event) {
    if (!this.map) return;
    const index = Math.floor(event.offsetY / this.size) * this.columns + Math.floor(event.offsetX / this.size);
    const cell = this.cells[index];
    if (!cell) return;
    const [name, tokens] = this.map.owners[cell[1]];
    const who = name ? ` · ${name} holds ${whole(tokens)} tokens` : "";
    this.hover.textContent = `page ${index * this.map.pages_per_cell + 1}: ${this.map.states[cell[0]]}${who}`;
  }
}

// ------------------------------------------------------------ the radix tree

class RadixTree {
  constructor(el, ctx) {
    this.ctx = ctx;
    this.note = make("div", el, { className: "note" });
    const two = make("div", el, { className: "two" });
    this.canvas = make("canvas", make("div", two, { className: "scroll" }), { dataset: { canvas: "tree" }, style: { cursor: "pointer" } });
    this.steps = make("div", two, { className: "steps scroll" });
    legend(el, Object.entries(STEP_COLOURS));
    this.chosen = make("pre", el, { textContent: "click a node for its tokens; click a step to go there" });
    this.places = new Map();
    this.fading = [];
    this.seen = null;
    this.canvas.onclick = (event) => this.click(event);
  }

  draw(view, colours) {
    const tree = view.tree;
    if (!tree) return;
    this.place(tree.nodes);
    const fresh = this.seen === null ? [] : tree.steps.filter((step) => step[0] > this.seen);
    this.seen = tree.seq;
    const now = performance.now();
    for (const [, , what, node] of fresh) {
      const spot = this.places.get(node) || (this.before && this.before.get(node));
      if (spot) this.fading.push({ what, spot, until: now + FADE_MS });
    }
    this.fading = this.fading.slice(-80);
    Object.assign(this, { tree, colours });
    this.paint();
    this.list(tree, colours);
    const hidden = tree.hidden ? `, ${tree.hidden} deeper ones are not drawn` : "";
    const sure = tree.exact ? "" : " · events were lost, the tree is incomplete";
    this.note.textContent = `${tree.nodes.length} nodes${hidden}${sure}`;
    this.note.classList.toggle("bad", !tree.exact);
    if (tree.chosen) this.chosen.textContent = this.describe(tree);
  }

  place(nodes) {
    this.before = this.places;
    this.places = new Map();
    const parents = new Set(nodes.map((node) => node[1]));
    let row = 0;
    const rows = new Map();
    for (let i = nodes.length - 1; i >= 0; i--) {
      const [number, parent] = nodes[i];
      if (!parents.has(number)) rows.set(number, row++);
      const mine = rows.get(number);
      if (!rows.has(parent) || mine > rows.get(parent)) rows.set(parent, mine); // beside its first child
    }
    this.rows = Math.max(1, row);
    for (const [number, , depth] of nodes) this.places.set(number, [depth, this.rows - 1 - rows.get(number)]);
  }

  box(spot, width) {
    const step = Math.max(46, Math.min(150, (width - 60) / Math.max(1, this.deepest + 1)));
    return [8 + spot[0] * step + 24, spot[1] * 18 + 4, step - 18, 14];
  }

  paint() {
    const { tree, colours } = this;
    this.deepest = Math.max(0, ...tree.nodes.map((node) => node[2]));
    const [pen, width] = surface(this.canvas, this.rows * 18 + 8);
    this.width = width;
    pen.strokeStyle = colours.muted;
    for (const [number, parent] of tree.nodes) {
      const [x, y, , h] = this.box(this.places.get(number), width);
      const up = this.places.get(parent);
      const [px, py, pw] = up ? this.box(up, width) : [4, 4, 4];
      pen.beginPath();
      pen.moveTo(px + pw, py + h / 2);
      pen.bezierCurveTo(px + pw + 10, py + h / 2, x - 10, y + h / 2, x, y + h / 2);
      pen.stroke();
    }
    for (const [number, , , tokens, locks] of tree.nodes) {
      const [x, y, w, h] = this.box(this.places.get(number), width);
      pen.fillStyle = locks ? colours.protected : colours.evictable;
      pen.fillRect(x, y, w, h);
      pen.fillStyle = locks ? colours.ground : colours.text;
      const held = `${tokens} · held ${locks}×`;
      pen.fillText(locks && pen.measureText(held).width < w - 6 ? held : String(tokens), x + 4, y + h / 2 + 0.5);
      if (number === this.ctx.wanted.node) {
        pen.strokeStyle = colours.text;
        pen.strokeRect(x - 1, y - 1, w + 2, h + 2);
      }
    }
    this.glow(pen, width);
  }

  glow(pen, width) {
    const now = performance.now();
    this.fading = this.fading.filter((each) => each.until > now);
    for (const { what, spot, until } of this.fading) {
      const [x, y, w, h] = this.box(spot, width);
      pen.globalAlpha = (until - now) / FADE_MS;
      pen.strokeStyle = this.colours[STEP_COLOURS[what]];
      pen.lineWidth = 3;
      pen.strokeRect(x - 2, y - 2, w + 4, h + 4);
    }
    pen.globalAlpha = 1;
    pen.lineWidth = 1;
    if (this.fading.length && !this.timer) {
      this.timer = setTimeout(() => { this.timer = null; if (!this.closed) this.paint(); }, 100);
    }
  }

  list(tree, colours) {
    const shown = tree.steps.slice(-40).reverse();
    this.steps.replaceChildren(...shown.map(([seq, t, what, node, other, tokens, rid]) => {
      const at = other ? (what === "split" ? ` from ${other}` : ` under ${other}`) : "";
      const line = make("div", null, { textContent: `${what} node ${node}${at}: ${tokens}${rid ? " · " + short(rid) : ""}`,
        title: `${clock(t)}: ${what} ${tokens} tokens ${rid}` });
      line.style.borderColor = colours[STEP_COLOURS[what]];
      line.onclick = () => this.ctx.wish({ at: seq });
      return line;
    }));
  }

  describe(tree) {
    const { node, ids, of, text } = tree.chosen;
    const found = tree.nodes.find((each) => each[0] === node);
    const owners = found && found[5].length ? `locked by ${found[5].join(", ")}` : "not locked";
    const used = found && found[6] >= 0 ? `, last used at ${clock(found[6])}` : "";
    const more = of > ids.length ? " …" : "";
    return `node ${node}: ${of} tokens, ${owners}${used}\n${text ? text + "\n" : ""}${ids.join(" ")}${more}`;
  }

  click(event) {
    for (const [number, spot] of this.places) {
      const [x, y, w, h] = this.box(spot, this.width);
      if (event.offsetX >= x && event.offsetX <= x + w && event.offsetY >= y - 2 && event.offsetY <= y + h + 2) {
        this.ctx.wish({ node: number });
      }
    }
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
  }
}

// ------------------------------------------------------------ one request

class Journey {
  constructor(el, ctx) {
    this.ctx = ctx;
    const bar = make("div", el, { className: "bar" });
    bar.append("request ");
    this.select = make("select", bar, { dataset: { n: "journey-rid" } });
    this.select.onchange = () => ctx.wish({ rid: this.select.value });
    this.note = make("span", bar, { className: "note" });
    this.canvas = make("canvas", el, { dataset: { canvas: "journey" } });
    this.list = make("div", el);
    this.text = make("pre", el, { dataset: { n: "explanation" }, style: { whiteSpace: "pre" } });
  }

  draw(view, colours) {
    const way = view.journey;
    if (!way) return;
    this.options(way);
    this.note.textContent = way.rid ? `${clock(way.total_ms)}${way.done ? "" : " so far"}` : "no request yet";
    this.bar(way, colours);
    this.types(way);
    if (this.text.textContent !== way.text) this.text.textContent = way.text;
  }

  options(way) {
    if (document.activeElement === this.select) return;
    const rids = way.rid && !way.rids.includes(way.rid) ? [way.rid, ...way.rids] : way.rids;
    if (rids.join() !== this.known) {
      this.known = rids.join();
      this.select.replaceChildren(...rids.map((rid) => make("option", null, { value: rid, textContent: rid })));
    }
    this.select.value = way.rid;
  }

  bar(way, colours) {
    const [pen, width] = surface(this.canvas, 34);
    const scale = width / Math.max(0.001, way.total_ms);
    for (const [start, length, cause, colour] of way.parts) {
      pen.fillStyle = colours[colour];
      const w = Math.max(0.7, length * scale);
      pen.fillRect(start * scale, 0, w, 20);
      if (w > pen.measureText(cause).width + 6) {
        pen.fillStyle = colours.ground;
        pen.fillText(cause, start * scale + 3, 10);
      }
    }
    pen.fillStyle = colours.muted;
    pen.fillText("0", 0, 28);
    const end = clock(way.total_ms);
    pen.fillText(end, width - pen.measureText(end).width, 28);
  }

  types(way) {
    const key = way.rid + way.steps.length;
    if (key === this.key) return;
    this.key = key;
    this.list.replaceChildren(...way.steps.map((step) => {
      const box = make("details", null);
      const head = make("summary", box);
      make("b", head, { textContent: step.type });
      head.append(` in ${step.component}`);
      make("em", head, { textContent: `${step.t_ms.toFixed(3)} ms${step.pid ? " · pid " + step.pid : ""}` });
      const table = make("table", box);
      for (const [name, value] of Object.entries(step.holds)) {
        const row = make("tr", table);
        make("th", row, { textContent: name });
        make("td", row, { textContent: value });
      }
      return box;
    }));
  }
}

// ------------------------------------------------------------ host and device

const HOST_STAGES = ["receive", "plan", "launch", "process", "stream", "loop", "wait"];
const STRETCHES = [0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30];
const DEVICE_COLOURS = { extend: "prefill", sample: "muted" };
const HATCH = "repeating-linear-gradient(45deg, var(--alert) 0 1.5px, transparent 1.5px 4px)";
const SAY = { wait: "waits for a result", loop: "between the stages", idle: "idle, with work to do", hidden: "hidden behind the device",
  exposed: "exposed: the device stands still" };

class OverlapLanes {
  constructor(el, ctx) {
    const bar = make("div", el, { className: "bar" });
    bar.append("the last ");
    this.stretch = make("select", bar, { dataset: { n: "stretch" } });
    for (const seconds of STRETCHES) this.option(seconds);
    this.stretch.onchange = () => ctx.wish({ seconds: Number(this.stretch.value) });
    this.note = make("span", bar, { className: "note", dataset: { n: "overlap-note" } });
    this.canvas = make("canvas", el, { dataset: { canvas: "overlap" } });
    this.hover = make("div", el, { className: "note", textContent: "point at a span" });
    legend(el, [["host hidden", "host_hidden"], ["host exposed", "host_exposed"], ["device: extend", "prefill"], ["decode", "decode"],
      ["mixed", "mixed"], ["sampling", "muted"], ["device idle, work to do", HATCH]]);
    legend(el, HOST_STAGES.map((name) => [`host: ${name}`, "host_" + name]));
    this.canvas.onmousemove = (event) => this.point(event);
  }

  option(seconds) {
    const text = seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds} s`;
    make("option", this.stretch, { value: String(seconds), textContent: text });
  }

  draw(view, colours) {
    const lanes = view.overlap;
    if (!lanes) return;
    this.lanes = lanes;
    if (![...this.stretch.options].some((each) => Number(each.value) === lanes.seconds)) this.option(lanes.seconds);
    if (document.activeElement !== this.stretch) this.stretch.value = String(lanes.seconds);
    this.say(lanes);
    const left = 52, [pen, width] = surface(this.canvas, 122);
    const scale = (width - left - 2) / Math.max(0.001, lanes.end_ms - lanes.begin_ms);
    Object.assign(this, { left, scale });
    this.rows = [[18, 32, lanes.host], [53, 9, lanes.kinds], [65, 36, lanes.device]];
    pen.fillStyle = colours.muted;
    pen.fillText("host", 2, 34);
    pen.fillText("device", 2, 83);
    for (const [top, high, spans] of this.rows) {
      pen.fillStyle = colours.free;
      pen.fillRect(left, top, width - left - 2, high);
      for (const [start, length, name] of spans) this.span(pen, colours, top, high, start, length, name);
    }
    this.turns(pen, colours, width);
    pen.fillStyle = colours.muted;
    pen.fillText(clock(lanes.begin_ms), left, 112);
    const end = clock(lanes.end_ms);
    pen.fillText(end, width - pen.measureText(end).width - 2, 112);
  }

  span(pen, colours, top, high, start, length, name) {
    const x = this.left + (start - this.lanes.begin_ms) * this.scale, w = length * this.scale;
    if (name === "idle") {
      this.hatch(pen, colours, x, top, w, high);
      return;
    }
    pen.fillStyle = colours["host_" + name] || colours[DEVICE_COLOURS[name] || name] || colours.decode;
    pen.fillRect(x, top, Math.max(0.6, w - (top > 60 && w > 4 ? 1 : 0)), high);
  }

  hatch(pen, colours, x, top, w, high) {
    if (w < 3) {
      pen.fillStyle = colours.alert;
      pen.globalAlpha = 0.55;
      pen.fillRect(x, top, Math.max(0.6, w), high);
      pen.globalAlpha = 1;
      return;
    }
    pen.save();
    pen.beginPath();
    pen.rect(x, top, w, high);
    pen.clip();
    pen.strokeStyle = colours.alert;
    pen.lineWidth = 1;
    pen.beginPath();
    // lines at fixed places, so that neighbours join and a moving picture does not flicker
    for (let at = Math.floor((x - high) / 6) * 6; at < x + w; at += 6) {
      pen.moveTo(at, top + high);
      pen.lineTo(at + high, top);
    }
    pen.stroke();
    pen.restore();
  }

  turns(pen, colours, width) {
    let last = -1e9;
    pen.font = SMALL;
    for (const [t, number] of this.lanes.turns) {
      const x = this.left + (t - this.lanes.begin_ms) * this.scale, label = String(number);
      if (x < last || x + pen.measureText(label).width > width - 2) continue;
      pen.fillStyle = colours.muted;
      pen.fillText(label, x + 2, 7);
      pen.fillRect(x, 2, 1, 14);
      last = x + Math.max(46, pen.measureText(label).width + 10);
    }
    pen.fillStyle = colours.muted;
    pen.fillText("iteration", 0, 7);
  }

  say(lanes) {
    const n = lanes.numbers, share = (part) => (100 * part).toFixed(0) + " %";
    const coarse = lanes.column_ms ? ` · drawn in columns of ${lanes.column_ms.toFixed(2)} ms, each by what took most of it` : "";
    const lost = lanes.missing ? ` · ${whole(lanes.missing)} events were lost` : "";
    this.note.textContent = !n.launches && !n.busy_s ? "no forward in this stretch" :
      `device busy ${share(n.busy_share)}, idle with work ${share(n.idle_share)} · host time hidden ${share(n.hidden_share)} ` +
      `(${clock(n.hidden_s * 1000)}), exposed ${clock(n.exposed_s * 1000)}, waiting ${clock(n.wait_s * 1000)} · ` +
      `${whole(n.launches)} forwards${coarse}${lanes.cut ? " · too many events for more" : ""}${lost}`;
    this.note.classList.toggle("bad", lanes.missing > 0);
  }

  point(event) {
    const row = this.rows && this.rows.find(([top, high]) => event.offsetY >= top - 1 && event.offsetY <= top + high + 1);
    if (!row) return;
    const at = this.lanes.begin_ms + (event.offsetX - this.left) / this.scale;
    const near = row[2].find(([start, length]) => at >= start && at <= start + Math.max(length, 1 / this.scale));
    if (!near) return;
    const [start, length, name, bid] = near;
    const who = ["host", "host time", "device"][this.rows.indexOf(row)];
    this.hover.textContent = `${who}: ${SAY[name] || name}${bid ? ` (batch ${bid})` : ""}, ${length.toFixed(3)} ms from ${start.toFixed(3)} ms`;
  }
}

// ------------------------------------------------------------ a load

const KNOBS = [["rate", "arrivals a second", 0.5, 0.5], ["concurrency", "requests at a time", 1, 1], ["prompt_tokens", "prompt tokens", 1, 1],
  ["output_tokens", "output tokens", 1, 1], ["shared_share", "shared beginning", 0, 0.05]];
const LOAD_TILES = [["sent", "sent"], ["finished", "finished"], ["failed", "failed"], ["in_flight", "in flight"], ["sent_per_s", "sent/s"],
  ["finished_per_s", "finished/s"], ["tokens_per_s", "tokens/s"]];

class LoadPanel {
  constructor(el, ctx) {
    this.ctx = ctx;
    const bar = make("div", el, { className: "bar" });
    this.go = make("button", bar, { dataset: { act: "load" }, textContent: "start" });
    this.go.onclick = () => ctx.load(this.running ? "stop" : "start");
    this.how = make("select", bar, { dataset: { n: "arrivals" } });
    make("option", this.how, { value: "rate", textContent: "arrivals at a rate" });
    make("option", this.how, { value: "loop", textContent: "so many at a time" });
    this.how.onchange = () => ctx.load({ rate: this.how.value === "rate" ? this.lastRate || 4 : null });
    bar.append("seed ");
    this.seed = make("input", bar, { type: "number", step: 1, style: { width: "70px" }, dataset: { n: "seed" } });
    this.seed.onchange = () => ctx.load({ seed: Math.round(Number(this.seed.value)) });
    this.target = make("span", bar, { className: "note" });
    const knobs = make("div", el, { className: "knobs" });
    this.knobs = KNOBS.map(([name, label, least, step]) => this.knob(knobs, name, label, least, step));
    const tiles = make("div", el, { className: "tiles" });
    this.numbers = LOAD_TILES.map(([name, label]) => {
      const tile = make("div", tiles, { className: "tile" });
      const number = make("b", tile, { textContent: "–", dataset: { n: name } });
      make("span", tile, { textContent: label });
      return [name, number];
    });
    this.chart = make("canvas", el, { dataset: { canvas: "load" } });
    legend(el, [["sent/s", "prefill"], ["finished/s", "decode"], ["in flight (own scale)", "queue"]]);
    this.note = make("div", el, { className: "note bad", dataset: { n: "load-note" } });
    this.wanted = {};
    this.send = paced(() => {
      ctx.load(this.wanted);
      this.wanted = {};
    });
  }

  knob(parent, name, label, least, step) {
    const title = make("label", parent, { textContent: label });
    const input = make("input", parent, { type: "range", min: least, step, dataset: { knob: name } });
    const output = make("output", parent);
    const knob = { name, title, input, output, held: false };
    input.oninput = () => {
      knob.held = true;
      output.textContent = this.text(name, Number(input.value));
      this.change(name, Number(input.value));
    };
    input.onchange = () => { knob.held = false; };
    return knob;
  }

  text(name, value) {
    if (name === "shared_share") return `${Math.round(100 * value)} %`;
    return name === "rate" ? String(Math.round(value * 100) / 100) : whole(value);
  }

  change(name, value) {
    this.wanted[name] = value;
    this.send();
  }

  draw(view, colours) {
    const load = view.load;
    if (!load) return;
    const { shape, counts, limits } = load;
    this.running = load.running;
    this.lastRate = shape.rate || this.lastRate;
    this.go.textContent = load.running ? "stop" : "start";
    this.go.classList.toggle("on", load.running);
    if (document.activeElement !== this.how) this.how.value = shape.rate === null ? "loop" : "rate";
    if (document.activeElement !== this.seed) this.seed.value = shape.seed;
    this.target.textContent = load.target;
    for (const knob of this.knobs) this.turn(knob, shape, limits);
    for (const [name, number] of this.numbers) {
      number.textContent = name.endsWith("_per_s") ? counts[name].toFixed(name === "tokens_per_s" ? 0 : 1) : whole(counts[name]);
    }
    this.note.textContent = load.error || counts.note;
    this.lines(load, colours);
  }

  turn({ name, title, input, output, held }, shape, limits) {
    const off = name === (shape.rate === null ? "rate" : "concurrency");
    input.disabled = off;
    for (const each of [title, input, output]) each.classList.toggle("off", off);
    input.max = limits[name];
    if (held) return;
    const value = shape[name] === null ? this.lastRate || 4 : shape[name];
    input.value = value;
    output.textContent = this.text(name, value);
  }

  lines(load, colours) {
    const [pen, width] = surface(this.chart, 84), left = 30, base = 70;
    pen.strokeStyle = colours.grid;
    pen.strokeRect(left, 6, width - left - 4, base - 6);
    const rows = load.history;
    if (rows.length < 2) return;
    const most = Math.max(1, ...rows.map((row) => Math.max(row[0], row[1]))), crowd = Math.max(1, ...rows.map((row) => row[2]));
    pen.fillStyle = colours.muted;
    pen.fillText(whole(most), 4, 10);
    pen.fillText("0", 4, base - 4);
    const past = `${(rows.length * load.step_s).toFixed(0)} s ago`, now = `now · at most ${crowd} in flight`;
    pen.fillText(past, left, base + 8);
    pen.fillText(now, width - pen.measureText(now).width - 4, base + 8);
    for (const [index, top, colour] of [[2, crowd, "queue"], [0, most, "prefill"], [1, most, "decode"]]) {
      pen.strokeStyle = colours[colour];
      pen.lineWidth = 1.6;
      pen.beginPath();
      rows.forEach((row, i) => {
        const x = left + (i / (rows.length - 1)) * (width - left - 4), y = base - (row[index] / top) * (base - 10);
        if (i) pen.lineTo(x, y); else pen.moveTo(x, y);
      });
      pen.stroke();
    }
  }

  close() {
    this.send.cancel();
  }
}

// ------------------------------------------------------------ the stepper

const SECTIONS = ["waiting", "running", "chunked", "adder", "pools", "limits", "batches", "tree"];
const STEP_BUTTONS = [["stop", "next stop"], ["decision", "next decision"], ["iteration", "next iteration"]];
const GOALS = ["prefill", "first token", "finish"];
const LIMITS = [["max_running_requests", "running at most"], ["chunked_prefill_size", "chunk"], ["max_total_tokens", "KV tokens (down only)"]];

class Stepper {
  constructor(el, ctx) {
    this.ctx = ctx;
    const bar = make("div", el, { className: "bar" });
    this.hold = this.button(bar, "attach", () => this.toggle());
    this.pause = this.button(bar, "pause", () => this.go({ op: "pause" }));
    this.steps = STEP_BUTTONS.map(([what, label]) => this.button(bar, label, () => this.step(what)));
    this.run = this.button(bar, "continue", () => this.letRun());
    this.past = [["iteration", -1, "◀ iteration"], ["event", -1, "◀ event"], ["event", 1, "event ▶"], ["iteration", 1, "iteration ▶"]].map(
      ([what, by, label]) => this.button(bar, label, () => this.lookBack(what, by)));
    const one = make("div", el, { className: "bar" });
    one.append("request ");
    this.known = make("datalist", one, { id: `sgviz-rids-${Math.random().toString(36).slice(2)}` });
    this.rid = make("input", one, { type: "text", placeholder: "choose or type a rid", style: { width: "170px" }, dataset: { n: "rid" } });
    this.rid.setAttribute("list", this.known.id);
    this.rid.onchange = () => this.status.parked && this.look().catch((error) => this.fail(error));
    one.append("step to ");
    this.goals = GOALS.map((to) => this.button(one, to, () => this.stepTo(to)));
    const points = make("div", el, { className: "bar" });
    this.test = make("input", points, { type: "text", placeholder: 'breakpoint, e.g. refused and reason == "kv"', style: { width: "330px" } });
    this.add = this.button(points, "add breakpoint", () => this.addPoint());
    this.points = make("span", points);
    this.limits = make("div", el, { className: "bar" });
    this.inputs = {};
    for (const [name, label] of LIMITS) {
      this.limits.append(label + " ");
      this.inputs[name] = make("input", this.limits, { type: "number", style: { width: "84px" }, dataset: { limit: name } });
    }
    this.limits.append("policy ");
    this.policy = make("select", this.limits, { dataset: { limit: "schedule_policy" } });
    this.set = this.button(this.limits, "change limits", () => this.setLimits());
    this.say = make("pre", el, { dataset: { n: "where" }, textContent: "not attached: the scheduler runs freely" });
    this.panes = make("div", el, { className: "panes" });
    this.show({ attached: ctx.attached, parked: false, breakpoints: [] });
    if (ctx.attached) this.follow();
  }

  button(parent, label, act) {
    const node = make("button", parent, { textContent: label, dataset: { act: label } });
    node.onclick = () => Promise.resolve(act()).catch((error) => this.fail(error));
    return node;
  }

  draw() {}

  fail(error) {
    this.say.textContent = String(error.message || error);
  }

  async toggle() {
    if (this.status.attached) {
      await this.ctx.debug({ op: "detach" });
      this.watch = null; // what is still under way is about a hold that is over
      this.show({ attached: false, parked: false, breakpoints: [] });
      return;
    }
    this.show((await this.ctx.debug({ op: "attach" })).status);
    this.follow();
  }

  step(what) {
    return this.go(what === "decision" ? { op: "resume", until: "decision" } : { op: "resume", to: what });
  }

  async go(command) {
    this.show((await this.ctx.debug(command)).status);
    this.follow();
  }

  async letRun() {
    await this.go({ op: "resume" });
  }

  async stepTo(to) {
    if (!this.rid.value) throw new Error("choose a request first");
    await this.go({ op: "step_to", rid: this.rid.value, to });
  }

  async addPoint() {
    await this.ctx.debug({ op: "add_breakpoint", text: this.test.value });
    this.test.value = "";
    this.show((await this.ctx.debug({ op: "wait", after: 1e15 })).status);
  }

  async setLimits() {
    const command = { op: "set_limits" };
    for (const [name, input] of Object.entries(this.inputs)) if (input.value !== "") command[name] = Number(input.value);
    if (this.policy.value && this.policy.value !== this.ordered) command.schedule_policy = this.policy.value;
    await this.ctx.debug(command);
    for (const input of Object.values(this.inputs)) input.value = "";
    await this.look();
  }

  /** Waits for the next stop, in the background, and shows it; a newer wait takes its place. */
  async follow() {
    const watch = (this.watch = {});
    while (this.watch === watch && !this.closed) {
      try {
        const { status } = await this.ctx.debug({ op: "wait", after: this.status.stop_no || 0, timeout_s: this.ctx.waitS });
        if (this.watch !== watch) return;
        this.show(status);
        if (!status.attached) return;
        if (status.parked && status.stop_no !== this.shownStop) await this.look();
      } catch (error) {
        if (this.watch === watch) this.fail(error);
        return;
      }
    }
  }

  async look() {
    const { watch } = this, { view, status } = await this.seen();
    if (this.watch !== watch) return; // it was let go or runs on: this is of before
    this.then = null;
    this.show(status);
    this.shownStop = status.stop_no;
    const reqs = [...view.waiting, ...view.chunked, ...view.running];
    this.known.replaceChildren(...reqs.map((req) => make("option", null, { value: req.rid })));
    this.inForce(view.limits);
    this.panes.replaceChildren(
      this.pane("queue", view.waiting.map(reqRow)), this.pane("running", view.running.map(reqRow)),
      this.pane("prompt being cut", view.chunked.map(reqRow)), this.pane("PrefillAdder", facts(view.adder), 12, false),
      this.pane("KV pool", facts(view.pools), 12, false), this.pane("limits", facts(view.limits, ["policies"]), 12, false),
      this.pane("batches", view.batches.map((b) => [`${b.place} ${b.bid}`, `${b.mode} of ${b.rids.length}: ${b.rids.map(short).join(" ")}`])),
      this.pane("radix tree", view.tree.map(nodeRow)),
      ...(view.types || []).map((type) => this.pane(`${type.type} of ${short(this.rid.value)}`, facts(type.fields), 40, false)),
    );
  }

  /** What is to be seen, with the types of the chosen request while it is there. */
  async seen() {
    const rid = this.rid.value;
    if (rid) {
      try {
        return await this.ctx.debug({ op: "look", what: [...SECTIONS, "types"], rid });
      } catch (error) {
        this.gone = String(error.message || error);
      }
    }
    return this.ctx.debug({ op: "look", what: SECTIONS });
  }

  inForce(limits) {
    for (const [name, input] of Object.entries(this.inputs)) input.placeholder = String(limits[name]);
    const policies = [...new Set([limits.schedule_policy, ...limits.policies])], now = limits.pending.schedule_policy || limits.schedule_policy;
    if (now === this.ordered && policies.length === this.policy.options.length) return;
    this.ordered = now;
    this.policy.replaceChildren(...policies.map((name) => make("option", null, { value: name, textContent: name })));
    this.policy.value = now;
  }

  /** A titled table of the first `most` rows. `counted`: how many there are says something. */
  pane(title, rows, most = 12, counted = true) {
    const box = make("div", null);
    make("h3", box, { textContent: !rows.length ? `${title}: empty` : counted ? `${title} (${rows.length})` : title });
    const table = make("table", box);
    for (const cells of rows.slice(0, most)) {
      const row = make("tr", table);
      cells.forEach((cell, i) => make(i ? "td" : "th", row, { textContent: cell }));
    }
    if (rows.length > most) make("div", box, { className: "note", textContent: `and ${rows.length - most} more` });
    return box;
  }

  async lookBack(what, by) {
    const then = await this.ctx.past(by, what);
    if (!then) return;
    const text = `event ${then.count}, ${clock(then.t_ms)}, iteration ${then.iteration}: from the recording, the scheduler has not moved`;
    this.then = { stop: this.status.stop_no, text };
    this.show(this.status);
    const pools = { total: then.total, free: then.free, evictable: then.evictable, protected: then.protected, private: then.private_total };
    this.panes.replaceChildren(
      this.pane("queue then", then.waiting.map((rid) => [short(rid)])), this.pane("running then", then.running.map((rid) => [short(rid)])),
      this.pane("KV pool then", facts(pools), 12, false), this.pane("held then", Object.entries(then.private).map(([rid, n]) => [short(rid), String(n)])),
      this.pane("radix tree then", then.tree.map(nodeRow)),
    );
  }

  show(status) {
    this.status = status;
    const { attached, parked, where } = status;
    this.hold.textContent = attached ? "let go" : "attach";
    this.pause.disabled = !attached || parked;
    for (const button of [...this.steps, ...this.goals, ...this.past, this.run, this.set, this.policy]) button.disabled = !attached || !parked;
    this.add.disabled = !attached;
    this.points.replaceChildren(...(status.breakpoints || []).map((point) => {
      const node = make("button", null, { textContent: `${point.text} (${point.hits}) ✕`, title: "remove" });
      node.onclick = () => this.ctx.debug({ op: "remove_breakpoint", number: point.number }).then((r) => this.show(r.status));
      return node;
    }));
    if (!attached) this.say.textContent = status.note ? `let go: ${status.note}` : "not attached: the scheduler runs freely";
    else if (!parked) this.say.textContent = "running";
    else if (this.then && this.then.stop === status.stop_no) this.say.textContent = this.then.text;
    else if (where) {
      const place = where.stop || (where.event ? String(where.event[4][0]) : "");
      this.say.textContent = [`stop ${where.stop_no} at ${place}, iteration ${where.iteration} (${where.why})`, ...where.decided].join("\n");
    }
  }

  close() {
    this.closed = true;
    this.watch = null;
    if (this.status.attached && this.ctx.letGo) this.ctx.letGo();
  }
}

const reqRow = (req) => [short(req.rid), `prompt ${req.prompt}, output ${req.output}/${req.max_new}, KV ${req.kv_allocated}` +
  (req.retractions ? `, retracted ${req.retractions}×` : "") + (req.admitted ? ", admitted" : "")];

const MOST_TEXT = 160; // of a field; the object in Python has it all
const nodeRow = (node) => [`${"· ".repeat(Math.min(6, node.depth))}node ${node.node}`,
  `${node.tokens} tokens${node.locks ? `, locked by ${node.owners.map(short).join(" ")}` : ", evictable"}`];

function facts(view, without = []) {
  if (!view) return [];
  return Object.entries(view).filter(([name]) => !without.includes(name)).map(([name, value]) => {
    if (Array.isArray(value)) return [name, value.slice(0, 6).map((v) => (Array.isArray(v) ? `${short(v[0])} ${v[1]}` : short(String(v)))).join(", ")];
    const text = value && typeof value === "object" ? JSON.stringify(value) : String(value);
    return [name, text.length <= MOST_TEXT ? text : text.slice(0, MOST_TEXT) + "…"];
  });
}

// ------------------------------------------------------------ what holds panels together

const PANELS = { dashboard: Dashboard, kv: KvMap, tree: RadixTree, journey: Journey, overlap: OverlapLanes, load: LoadPanel, stepper: Stepper };
// the clocks of the scrubber: where they stand, and how far back and forth one may go
const CLOCKS = { event: ["seq", "oldest", "newest"], ms: ["t_ms", "oldest_ms", "newest_ms"], iteration: ["iteration", "oldest_iteration", "newest_iteration"] };
const CLOCK_NAMES = { event: "events", ms: "wall time", iteration: "iterations" };

class Stage {
  /** A root with panels, a scrubber for all of them, and at most one drawing a frame. */
  constructor(root, ctx, themes) {
    this.root = root;
    this.themes = themes;
    this.ctx = ctx;
    this.panels = [];
    root.classList.add("sgviz");
    make("style", root, { textContent: CSS });
    this.scheme = window.matchMedia("(prefers-color-scheme: dark)");
    this.repaint = () => this.ask();
    this.scheme.addEventListener("change", this.repaint);
    this.resized = new ResizeObserver(this.repaint);
    this.resized.observe(root);
    this.themed = new MutationObserver(this.repaint);
    const attributeFilter = ["data-jp-theme-light", "data-theme"];
    for (const each of [document.documentElement, document.body]) this.themed.observe(each, { attributes: true, attributeFilter });
    this.colour();
  }

  scrubber() {
    const bar = this.bar = make("div", this.root, { className: "bar" });
    this.hold = make("button", bar, { textContent: "pause view", dataset: { act: "pause view" } });
    this.hold.onclick = () => this.ctx.wish({ at: this.ctx.wanted.at === null && this.view ? this.view.seq : null });
    this.by = make("select", bar, { dataset: { n: "clock" }, title: "what the slider counts" });
    for (const [name, label] of Object.entries(CLOCK_NAMES)) make("option", this.by, { value: name, textContent: label });
    this.by.onchange = () => this.ask();
    const back = make("button", bar, { textContent: "◀", title: "one back", dataset: { act: "back" } });
    back.onclick = () => this.move(-1);
    this.range = make("input", bar, { type: "range", min: 0, max: 0, step: 1, dataset: { n: "scrubber" } });
    this.range.oninput = () => this.go(Number(this.range.value));
    const forth = make("button", bar, { textContent: "▶", title: "one forward", dataset: { act: "forth" } });
    forth.onclick = () => this.move(1);
    this.when = make("span", bar, { dataset: { n: "when" }, style: { fontVariantNumeric: "tabular-nums" } });
    return bar;
  }

  move(by) {
    if (!this.view) return;
    const [now, oldest] = CLOCKS[this.by.value];
    this.go(Math.max(this.view[oldest], this.view[now] + by));
  }

  /** Look at a place on the chosen clock; at its end: at the present. */
  go(value) {
    if (!this.view) return;
    const [, , newest] = CLOCKS[this.by.value];
    this.ctx.wish(value >= this.view[newest] ? { at: null } : { at: value, clock: this.by.value });
  }

  add(kind, parent) {
    const panel = new PANELS[kind](parent || make("div", this.root), this.ctx);
    this.panels.push(panel);
    return panel;
  }

  /** Which scheduler is looked at, where there are several; the moment that is looked at stays. */
  chooser(view) {
    if (!view.ranks || view.ranks.length < 2) return;
    if (!this.rank) {
      this.bar = this.bar || make("div", null, { className: "bar" });
      if (!this.bar.parentNode) this.root.querySelector("style").after(this.bar);
      const named = make("label", null, { textContent: "rank " });
      this.rank = make("select", named, { dataset: { n: "rank" }, title: "which data parallel rank is shown" });
      this.rank.onchange = () => {
        const past = this.ctx.wanted.at !== null;
        this.ctx.wish({ rank: Number(this.rank.value), rid: "", node: 0, at: past ? this.view.t_ms : null, clock: "ms" });
      };
      this.bar.prepend(named);
    }
    const known = view.ranks.join();
    if (this.rank.dataset.of !== known) {
      this.rank.dataset.of = known;
      this.rank.replaceChildren(...view.ranks.map((rank) => make("option", null, { value: rank, textContent: rank })));
    }
    if (document.activeElement !== this.rank || this.ctx.wanted.rank === undefined) this.rank.value = view.rank;
    this.root.dataset.rank = view.rank;
  }

  colour() {
    const colours = this.themes[isDark(this.root) ? "dark" : "light"];
    for (const [name, value] of Object.entries(colours)) this.root.style.setProperty("--" + name, value);
    return colours;
  }

  take(view) {
    this.view = view;
    if (view.fault || this.note) this.say(view.fault);
    this.ask();
  }

  /** One line above everything, for what no panel can tell. */
  say(text) {
    this.note = this.note || make("div", null, { className: "note bad", dataset: { n: "fault" } });
    this.note.textContent = text;
    this.root.prepend(this.note);
  }

  ask() {
    if (!this.frame && !this.closed) this.frame = requestAnimationFrame(() => { this.frame = null; this.draw(); });
  }

  draw() {
    const { view } = this, colours = this.colour(), began = performance.now();
    if (!view) return;
    this.chooser(view);
    if (this.range) this.clocks(view);
    for (const panel of this.panels) panel.draw(view, colours);
    this.root.dataset.seq = view.seq;
    this.root.dataset.drawn = Number(this.root.dataset.drawn || 0) + 1;
    this.root.dataset.drawMs = (performance.now() - began).toFixed(1);
  }

  clocks(view) {
    const [now, oldest, newest] = CLOCKS[this.by.value];
    this.range.step = this.by.value === "ms" ? "any" : 1;
    this.range.min = view[oldest];
    this.range.max = view[newest];
    if (document.activeElement !== this.range || this.ctx.wanted.at === null) this.range.value = view[now];
    const past = this.ctx.wanted.at !== null;
    this.hold.textContent = past ? (view.live ? "go live" : "go to the end") : "pause view";
    this.hold.classList.toggle("on", past);
    this.when.textContent = `${clock(view.t_ms)} · iteration ${view.iteration} · event ${view.seq}` + (past ? ` of ${view.newest}` : "");
  }

  close() {
    this.closed = true;
    cancelAnimationFrame(this.frame);
    this.scheme.removeEventListener("change", this.repaint);
    this.resized.disconnect();
    this.themed.disconnect();
    for (const panel of this.panels) if (panel.close) panel.close();
    this.root.replaceChildren();
  }
}

// ------------------------------------------------------------ in a notebook

function render({ model, el }) {
  const kind = model.get("kind");
  const wanted = { at: null, clock: "event", rid: "", node: 0 };
  const root = make("div", el);
  const asked = new Map();
  let number = 0;
  const call = (body) => new Promise((resolve, reject) => {
    asked.set(++number, [resolve, reject]);
    send({ call: number, body });
  });
  const send = (content) => {
    try {
      model.send(content);
    } catch (error) { // the kernel was restarted or shut down: the picture stays, nobody hears the buttons
      stage.say(`this picture is over: its kernel has ended (${error.message}). Run the cells again.`);
    }
  };
  const tell = paced(() => send({ wish: wanted }));
  const ctx = {
    wanted, attached: kind === "stepper", waitS: 1,
    wish(patch) {
      model.set("wished", { ...wishFor(wanted, patch) });
      tell();
    },
    debug: (command) => call(command),
    past: (by, what) => call({ op: "past", by, what }),
    load: (change) => send({ load: change }),
  };
  const stage = new Stage(root, ctx, JSON.parse(model.get("themes")));
  if (!["stepper", "journey", "load"].includes(kind)) stage.scrubber();
  stage.add(kind);
  const update = () => { const text = model.get("view"); if (text) stage.take(JSON.parse(text)); };
  // one widget shown twice is one wish: it stays in the page's model and is never saved to the kernel's
  const adopt = () => {
    Object.assign(wanted, model.get("wished"));
    if (wanted.rid && kind === "dashboard" && !stage.explained) stage.explained = stage.add("journey");
    stage.ask();
  };
  const answer = (message) => {
    const waiting = asked.get(message.call);
    if (!waiting) return;
    asked.delete(message.call);
    if (message.error) waiting[1](new Error(message.error)); else waiting[0](message.answer);
  };
  model.on("change:view", update);
  model.on("msg:custom", answer);
  model.on("change:wished", adopt);
  update();
  adopt();
  return () => {
    tell.cancel();
    model.off("change:view", update);
    model.off("msg:custom", answer);
    model.off("change:wished", adopt);
    for (const [, reject] of asked.values()) reject(new Error("closed"));
    stage.close();
  };
}

// ------------------------------------------------------------ on the page /viz

const RETRY_MS = 500;
const WAIT_S = 20;

/** Draws into `root` what the server at this origin streams. `key`: its admin or API key. */
export function page(root, { themes, key, debuggable, rank }) {
  const wanted = { at: null, clock: "event", rid: "", node: 0, rank }; // rank undefined: there is one scheduler
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const session = crypto.randomUUID ? crypto.randomUUID() : String(Math.random());
  let last = "", opened = null, beat = null, closed = false;

  async function debug(command) {
    const answer = await fetch("/sgviz/debug", { method: "POST", headers: { ...headers, "content-type": "application/json" },
      body: JSON.stringify({ session, ...command }) });
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error.message);
    if (command.op === "attach") beat = beat || setInterval(() => debug({ op: "renew" }).catch(() => {}), 2500);
    if (!body.status.attached) { clearInterval(beat); beat = null; }
    return body;
  }

  const reopen = paced(() => { last = ""; if (opened) opened.abort(); });
  const ctx = {
    wanted, attached: false, waitS: WAIT_S, debug,
    wish(patch) {
      wishFor(wanted, patch);
      if ("rank" in patch) history.replaceState(null, "", "?rank=" + patch.rank);
      reopen();
      stage.ask();
    },
    past(by, what) {
      const { view } = stage, [now, oldest] = CLOCKS[what];
      if (view) ctx.wish({ at: Math.max(view[oldest], view[now] + by), clock: what });
    },
    letGo() {
      clearInterval(beat);
      const body = JSON.stringify({ session, op: "detach" });
      fetch("/sgviz/debug", { method: "POST", keepalive: true, headers: { ...headers, "content-type": "application/json" }, body });
    },
  };
  const stage = new Stage(root, ctx, themes);
  const bar = stage.scrubber();
  const state = make("span", bar, { dataset: { n: "connection" }, textContent: "connecting" });
  const grid = make("div", root, { className: "grid" });
  const left = make("div", grid), right = make("div", grid);
  const section = (parent, title, name) => {
    const box = make("section", parent, { className: name });
    make("h2", box, { textContent: title });
    stage.add(name, make("div", box));
  };
  if (debuggable) section(left, "Step the scheduler" + (rank === undefined ? "" : " of rank 0"), "stepper");
  section(left, "Dashboard", "dashboard");
  section(right, "KV map", "kv");
  section(right, "Radix tree", "tree");
  section(right, "One request", "journey");

  function query() {
    const terms = { what: "dashboard,kv,tree,journey", rid: wanted.rid, node: wanted.node };
    if (wanted.at !== null) Object.assign(terms, { at: wanted.at, clock: wanted.clock });
    if (wanted.rank !== undefined) terms.rank = wanted.rank;
    return "/sgviz/events?" + new URLSearchParams(terms);
  }

  async function stream() {
    opened = new AbortController();
    const answer = await fetch(query(), { headers: last ? { ...headers, "Last-Event-ID": last } : headers, signal: opened.signal });
    if (!answer.ok) throw Object.assign(new Error((await answer.json()).error.message), { status: answer.status });
    state.textContent = "";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const messages = text.split("\n\n");
      text = messages.pop();
      const newest = messages.filter((message) => message.startsWith("id: ")).pop(); // older ones are drawn over anyway
      if (!newest) continue;
      const cut = newest.indexOf("\n");
      last = newest.slice(4, cut);
      stage.take(JSON.parse(newest.slice(cut + 7)));
    }
  }

  (async () => {
    while (!closed) {
      try {
        await stream();
      } catch (error) {
        if (error.name !== "AbortError") {
          state.textContent = `not connected (${error.message}); trying again`;
          if (error.status === 400) wanted.at = null; // that moment is forgotten; a broken connection leaves it in view
          await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
        }
      }
    }
  })();
  const close = () => { closed = true; reopen.cancel(); if (opened) opened.abort(); stage.close(); };
  window.addEventListener("pagehide", close, { once: true });
  return { close, stage, drop: () => opened && opened.abort() };
}

export default { render };
