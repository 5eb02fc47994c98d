// The live views: one module for the notebook (anywidget) and for the page /viz. It draws what Python folded and
// computes no number of its own. Views arrive as JSON (sgviz/viz/views/models.py); a user's wishes go back.

const FONT = "12px system-ui, sans-serif";
const SMALL = "10px system-ui, sans-serif";
const PHASES = ["tokenize", "queue", "prefill", "decode", "output"];
const STEP_COLOURS = { match: "prefill", split: "queue", insert: "decode", lock: "protected", unlock: "evictable", evict: "alert" };
const FADE_MS = 700;

const CSS = `
.sgviz { color: var(--text); background: var(--ground); font: ${FONT}; padding: 8px; box-sizing: border-box; }
.sgviz * { box-sizing: border-box; }
.sgviz .bar { display: flex; gap: 8px; align-items: center; flex-wrap: wrap; margin: 2px 0 6px; color: var(--muted); }
.sgviz .bar input[type=range] { flex: 1; min-width: 120px; accent-color: var(--prefill); }
.sgviz button, .sgviz select, .sgviz input[type=text], .sgviz input[type=number] { font: inherit; color: var(--text);
  background: var(--free); border: 1px solid var(--grid); border-radius: 4px; padding: 3px 9px; }
.sgviz button { cursor: pointer; } .sgviz button:disabled { opacity: .45; cursor: default; }
.sgviz button.on { border-color: var(--prefill); }
.sgviz .tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(84px, 1fr)); gap: 6px; margin-bottom: 8px; }
.sgviz .tile { border: 1px solid var(--grid); border-radius: 6px; padding: 5px 8px; min-width: 0; }
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
.sgviz table { border-collapse: collapse; font-size: 11px; } .sgviz td, .sgviz th { text-align: left; padding: 1px 10px 1px 0; }
.sgviz th { color: var(--muted); font-weight: normal; }
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
    make("i", item, { style: { background: `var(--${colour})` } });
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
    legend(el, PHASES.map((name) => [name, name]));
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
      if (!rows.has(parent) || mine < rows.get(parent)) rows.set(parent, mine);
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
      const [px, py, pw] = up ? this.box(up, width) : [4, this.rows * 9 - 5, 4];
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
    this.text = make("pre", el, { dataset: { n: "explanation" } });
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

// ------------------------------------------------------------ the stepper

const SECTIONS = ["waiting", "running", "chunked", "adder", "pools", "limits", "batches"];
const STEP_BUTTONS = [["stop", "next stop"], ["decision", "next decision"], ["iteration", "next iteration"]];

class Stepper {
  constructor(el, ctx) {
    this.ctx = ctx;
    this.stopNo = 0;
    const bar = make("div", el, { className: "bar" });
    this.hold = this.button(bar, "attach", () => this.toggle());
    this.pause = this.button(bar, "pause", () => this.go({ op: "pause" }));
    this.steps = STEP_BUTTONS.map(([what, label]) => this.button(bar, label, () => this.step(what)));
    this.run = this.button(bar, "continue", () => this.letRun());
    this.back = this.button(bar, "◀ event", () => this.past(-1));
    this.forth = this.button(bar, "event ▶", () => this.past(1));
    const points = make("div", el, { className: "bar" });
    this.test = make("input", points, { type: "text", placeholder: 'breakpoint, e.g. refused and reason == "kv"', style: { minWidth: "280px" } });
    this.add = this.button(points, "add breakpoint", () => this.addPoint());
    this.points = make("span", points);
    this.limits = make("div", el, { className: "bar" });
    this.inputs = {};
    for (const name of ["max_running_requests", "chunked_prefill_size", "max_total_tokens"]) {
      this.limits.append(name + " ");
      this.inputs[name] = make("input", this.limits, { type: "number", style: { width: "84px" } });
    }
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
      this.watch = null;
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

  async addPoint() {
    await this.ctx.debug({ op: "add_breakpoint", text: this.test.value });
    this.test.value = "";
    this.show((await this.ctx.debug({ op: "wait", after: 1e15 })).status);
  }

  async setLimits() {
    const command = { op: "set_limits" };
    for (const [name, input] of Object.entries(this.inputs)) if (input.value !== "") command[name] = Number(input.value);
    await this.ctx.debug(command);
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
        this.fail(error);
        return;
      }
    }
  }

  async look() {
    const { view, status } = await this.ctx.debug({ op: "look", what: SECTIONS });
    this.show(status);
    this.shownStop = status.stop_no;
    this.panes.replaceChildren(
      this.pane("queue", view.waiting.map(reqRow)), this.pane("running", view.running.map(reqRow)),
      this.pane("prompt being cut", view.chunked.map(reqRow)), this.pane("PrefillAdder", facts(view.adder)),
      this.pane("KV pool", facts(view.pools)), this.pane("limits", facts(view.limits)),
      this.pane("batches", view.batches.map((b) => [`${b.place} ${b.bid}`, `${b.mode} of ${b.rids.length}: ${b.rids.map(short).join(" ")}`])),
    );
  }

  pane(title, rows) {
    const box = make("div", null);
    make("h3", box, { textContent: rows.length ? `${title} (${rows.length})` : `${title}: empty` });
    const table = make("table", box);
    for (const cells of rows.slice(0, 12)) {
      const row = make("tr", table);
      cells.forEach((cell, i) => make(i ? "td" : "th", row, { textContent: cell }));
    }
    if (rows.length > 12) make("div", box, { className: "note", textContent: `and ${rows.length - 12} more` });
    return box;
  }

  async past(by) {
    const moment = await this.ctx.past(by);
    if (moment) this.say.textContent = `event ${moment.count}, ${clock(moment.t_ms)}, iteration ${moment.iteration}: ` +
      `${moment.running.length} running, ${moment.waiting.length} waiting, KV free ${moment.free}, evictable ${moment.evictable}, ` +
      `protected ${moment.protected}, private ${moment.private_total}`;
  }

  show(status) {
    this.status = status;
    const { attached, parked, where } = status;
    this.hold.textContent = attached ? "let go" : "attach";
    this.pause.disabled = !attached || parked;
    for (const button of [...this.steps, this.run, this.set, this.back, this.forth]) button.disabled = !attached || !parked;
    this.add.disabled = !attached;
    this.points.replaceChildren(...(status.breakpoints || []).map((point) => {
      const node = make("button", null, { textContent: `${point.text} (${point.hits}) ✕`, title: "remove" });
      node.onclick = () => this.ctx.debug({ op: "remove_breakpoint", number: point.number }).then((r) => this.show(r.status));
      return node;
    }));
    if (!attached) this.say.textContent = status.note ? `let go: ${status.note}` : "not attached: the scheduler runs freely";
    else if (!parked) this.say.textContent = "running";
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

function facts(view) {
  if (!view) return [];
  return Object.entries(view).map(([name, value]) => {
    if (Array.isArray(value)) return [name, value.slice(0, 6).map((v) => (Array.isArray(v) ? `${short(v[0])} ${v[1]}` : short(String(v)))).join(", ")];
    return [name, value && typeof value === "object" ? JSON.stringify(value) : String(value)];
  });
}

// ------------------------------------------------------------ what holds panels together

const PANELS = { dashboard: Dashboard, kv: KvMap, tree: RadixTree, journey: Journey, stepper: Stepper };

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
    this.colour();
  }

  scrubber() {
    const bar = make("div", this.root, { className: "bar" });
    this.hold = make("button", bar, { textContent: "pause view", dataset: { act: "pause view" } });
    this.hold.onclick = () => this.ctx.wish({ at: this.ctx.wanted.at === null && this.view ? this.view.seq : null });
    this.range = make("input", bar, { type: "range", min: 0, max: 0, step: 1 });
    this.range.oninput = () => this.ctx.wish({ at: Number(this.range.value) >= Number(this.range.max) ? null : Number(this.range.value) });
    this.when = make("span", bar, { dataset: { n: "when" } });
    return bar;
  }

  add(kind, parent) {
    const panel = new PANELS[kind](parent || make("div", this.root), this.ctx);
    this.panels.push(panel);
    return panel;
  }

  colour() {
    const colours = this.themes[isDark(this.root) ? "dark" : "light"];
    for (const [name, value] of Object.entries(colours)) this.root.style.setProperty("--" + name, value);
    return colours;
  }

  take(view) {
    this.view = view;
    this.ask();
  }

  ask() {
    if (!this.frame && !this.closed) this.frame = requestAnimationFrame(() => { this.frame = null; this.draw(); });
  }

  draw() {
    const { view } = this;
    if (!view) return;
    const colours = this.colour(), began = performance.now();
    if (this.range) this.clocks(view);
    for (const panel of this.panels) panel.draw(view, colours);
    this.root.dataset.seq = view.seq;
    this.root.dataset.drawn = Number(this.root.dataset.drawn || 0) + 1;
    this.root.dataset.drawMs = (performance.now() - began).toFixed(1);
  }

  clocks(view) {
    this.range.min = view.oldest;
    this.range.max = view.newest;
    if (document.activeElement !== this.range || this.ctx.wanted.at === null) this.range.value = view.seq;
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
    for (const panel of this.panels) if (panel.close) panel.close();
    this.root.replaceChildren();
  }
}

// ------------------------------------------------------------ in a notebook

function render({ model, el }) {
  const kind = model.get("kind");
  const wanted = { at: null, rid: "", node: 0 };
  const root = make("div", el);
  const asked = new Map();
  let number = 0;
  const call = (body) => new Promise((resolve, reject) => {
    asked.set(++number, [resolve, reject]);
    model.send({ call: number, body });
  });
  const ctx = {
    wanted, attached: kind === "stepper", waitS: 1,
    wish(patch) {
      Object.assign(wanted, patch);
      model.send({ wish: wanted });
      stage.ask();
      if (patch.rid && kind === "dashboard" && !stage.explained) stage.explained = stage.add("journey");
    },
    debug: (command) => call(command),
    past: (by) => call({ op: "past", by }),
  };
  const stage = new Stage(root, ctx, JSON.parse(model.get("themes")));
  if (kind !== "stepper" && kind !== "journey") stage.scrubber();
  stage.add(kind);
  const update = () => { const text = model.get("view"); if (text) stage.take(JSON.parse(text)); };
  const answer = (message) => {
    const waiting = asked.get(message.call);
    if (!waiting) return;
    asked.delete(message.call);
    if (message.error) waiting[1](new Error(message.error)); else waiting[0](message.answer);
  };
  model.on("change:view", update);
  model.on("msg:custom", answer);
  update();
  return () => {
    model.off("change:view", update);
    model.off("msg:custom", answer);
    for (const [, reject] of asked.values()) reject(new Error("closed"));
    stage.close();
  };
}

// ------------------------------------------------------------ on the page /viz

const RETRY_MS = 500;
const WAIT_S = 20;

/** Draws into `root` what the server at this origin streams. `key`: its admin or API key. */
export function page(root, { themes, key, debuggable }) {
  const wanted = { at: null, rid: "", node: 0 };
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

  const ctx = {
    wanted, attached: false, waitS: WAIT_S, debug,
    wish(patch) { Object.assign(wanted, patch); last = ""; if (opened) opened.abort(); stage.ask(); },
    past(by) { if (stage.view) ctx.wish({ at: Math.max(stage.view.oldest, stage.view.seq + by) }); },
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
  if (debuggable) section(left, "Step the scheduler", "stepper");
  section(left, "Dashboard", "dashboard");
  section(right, "KV map", "kv");
  section(right, "Radix tree", "tree");
  section(right, "One request", "journey");

  function query() {
    const terms = { what: "dashboard,kv,tree,journey", rid: wanted.rid, node: wanted.node };
    if (wanted.at !== null) terms.at = wanted.at;
    return "/sgviz/view?" + new URLSearchParams(terms);
  }

  async function stream() {
    opened = new AbortController();
    const answer = await fetch(query(), { headers: last ? { ...headers, "Last-Event-ID": last } : headers, signal: opened.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
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
          if (wanted.at !== null) ctx.wanted.at = null;
          await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
        }
      }
    }
  })();
  const close = () => { closed = true; if (opened) opened.abort(); stage.close(); };
  window.addEventListener("pagehide", close, { once: true });
  return { close, stage, drop: () => opened && opened.abort() };
}

export default { render };
