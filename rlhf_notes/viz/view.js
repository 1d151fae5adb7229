// A run, token by token: the page that rlhf_notes/view.py writes. RUN holds settings, rows, records, and what the run lacks.

const COLOURS = {push: "weight in the gradient", advantage: "advantage", ratio: "log ratio", kl: "log π − log π_ref", surprise: "log π of the sampler"};
const SORTS = {order: "as they came", score: "score", length: "length", kl: "KL"};
const CURVES = {score: "score", true_score: "true score", eval_score: "held-out score", kl_k1: "KL, nats", length: "response length",
  clip_fraction: "tokens clipped, share", entropy: "entropy, nats a token"};
const FIRST = 24;                                        // responses that are drawn at once

const digits = (x, n = 4) => x == null ? "–" : String(+x.toPrecision(n)).replace("-", "−");
const eachOf = (x, n) => Array.isArray(x) ? x : new Array(n).fill(x);

// A response as the page computes with it: numbers of each token, and `where`, the places of those that are the model's own.
function prepared(response) {
  const n = response.tokens.length, where = [...response.own].flatMap((c, t) => c === "1" ? [t] : []);
  const numbers = Object.fromEntries(["sampler", "policy", "reference", "advantage"].map((name) => [name, eachOf(response[name], n)]));
  const told = response.sampler != null, of = (name) => where.map((t) => numbers[name][t]);
  const kl = response.kl ?? (told && response.reference != null ? sumOf(where.map((t) => numbers.sampler[t] - numbers.reference[t])) : null);
  return {...response, numbers, where, told, kl, length: response.length ?? (told ? where.length : null), logp: of("policy"), old: of("sampler"),
    A: of("advantage"), ref: response.reference == null ? null : of("reference")};
}

// Weight, ratio and clip of each token of the responses, at the place where it stands.
function weigh(responses, settings) {
  const counted = responses.map((r) => r.told && r.scored !== false && r.policy != null ? r : {logp: [], old: [], A: []});
  pushes(counted, settings).forEach(({push, ratio, clipped}, i) => {
    const r = responses[i], place = (x) => { const all = new Array(r.tokens.length).fill(null); x.forEach((v, k) => { all[r.where[k]] = v; }); return all; };
    Object.assign(r.numbers, {push: place(push), ratio: place(ratio), clipped: place(clipped)});
  });
  return responses;
}

const VALUE = {
  push: (x, t) => x.push?.[t], advantage: (x, t) => x.advantage[t], ratio: (x, t) => x.ratio?.[t] == null ? null : Math.log(x.ratio[t]),
  kl: (x, t) => x.policy[t] == null || x.reference[t] == null ? null : x.policy[t] - x.reference[t], surprise: (x, t) => x.sampler[t],
};

function viewOf(box, run) {
  const {settings, records, rows} = run, known = Object.hasOwn(VARIANTS, settings.variant ?? "");
  const state = {at: records.length - 1, variant: known ? settings.variant : "grpo", aggregation: "", low: null, high: null, beta: null, colour: "push", sort: "order", up: false, shown: FIRST};
  const told = records.some(({responses}) => responses.some((r) => r.sampler != null));
  const list = make("div"), detail = make("div", {class: "detail", "aria-live": "polite", hidden: true}), about = make("p", {class: "case", "aria-live": "polite"});
  let responses = [], strips = [];

  const curves = Object.entries(CURVES).flatMap(([name, title]) => {
    const points = rows.filter((row) => row[name] != null).map((row) => [row.iteration, row[name]]);
    if (points.length < 2) return [];
    const ys = points.map(([, y]) => y), low = Math.min(...ys), high = Math.max(...ys), room = 0.08 * (high - low) || Math.abs(high) || 1, last = points.at(-1)[0];
    const chart = new Chart(title, {x: [Math.min(1, points[0][0]), last], y: [low - room, high + room], yticks: low < high ? [low, high] : [low], ytext: (v) => Math.abs(v) < 1e-3 * (high - low) ? "0" : Math.abs(v) < 0.01 ? v.toExponential(0).replaceAll("-", "−") : digits(v, digits(low, 2) === digits(high, 2) ? 3 : 2), xticks: [points[0][0], last], xlabel: "iteration", width: 200, height: 125});
    chart.svg.setAttribute("aria-label", `${title}: ${digits(ys[0])} at first, ${digits(ys.at(-1))} at last`);
    chart.svg.addEventListener("click", (e) => {
      const place = chart.svg.getBoundingClientRect(), x = chart.value((e.clientX - place.left) / place.width * chart.width);
      const far = records.map(({iteration}) => Math.abs(iteration - x));
      open(far.indexOf(Math.min(...far)));
    });
    chart.draw = () => {
      const here = records[state.at].iteration, point = points.find(([x]) => x === here);
      chart.clear().line([[here, low - room], [here, high + room]], "faint");
      chart.line(points, "first");
      if (point) chart.add("circle", {class: "dot", cx: chart.X(point[0]), cy: chart.Y(point[1]), r: 5});
    };
    return [chart];
  });

  function options() {
    const {variant, aggregation, low, high} = state, own = variant === settings.variant, record = records[state.at];
    return {variant, aggregation: aggregation || undefined, low: low ?? (own ? settings.low : null), high: high ?? (own ? settings.high : null),
      beta: state.beta ?? (settings.kl_in_loss ? record.kl_coef : 0), group: settings.group, length: settings.length};
  }
  function open(at) {
    state.at = at;
    state.shown = FIRST;
    responses = records[at].responses.map(prepared);
    iteration.set(at);
    curves.forEach((chart) => chart.draw());
    recompute();
  }
  function recompute() {
    const used = options(), [, below, above] = VARIANTS[state.variant];
    if (told) weigh(responses, used);
    for (const [knob, value] of [[lowDial, used.low ?? below], [highDial, used.high ?? used.low ?? above]]) { knob.hidden = below == null; if (value != null) knob.set(value); }
    betaDial.set(used.beta);
    arrange();
  }
  function arrange() {
    const {sort, up, shown} = state, key = (r) => r[sort] ?? -Infinity;
    const sorted = sort === "order" ? responses : [...responses].sort((a, b) => (up ? 1 : -1) * (key(a) - key(b)));
    strips = [];
    list.replaceChildren(...sorted.slice(0, shown).map(card), ...sorted.length > shown ? [button(`${sorted.length - shown} more`, () => { state.shown += FIRST; arrange(); })] : []);
    paint();
    detail.hidden = true;
    const n = responses.filter((r) => r.told).length;
    const clipped = responses.flatMap((r) => r.numbers.clipped ?? []).filter((c) => c != null), share = clipped.filter(Boolean).length;
    about.textContent = !told ? `${responses.length} responses.` : `${n} responses, ${clipped.length} tokens of the policy; the clip of ${state.variant} stops ${share} of them, ` +
      `where the policy stands after this update. Their weights are those of a loss of these responses alone.`;
  }
  function card(r) {
    const prompt = records[state.at].prompts[r.prompt] ?? "", parts = Object.entries(r.parts ?? {}).filter(() => Object.keys(r.parts).length > 1);
    const facts = [["score", r.score], ...parts.map(([name, x]) => [/^\d+$/.test(name) ? `reward ${+name + 1}` : plain(name), x]), ["tokens", r.length], ["KL", r.kl],
      ["A", Array.isArray(r.advantage) ? null : r.advantage]].filter(([, x]) => x != null).map(([name, x]) => make("span", {}, `${name} ${digits(x)}`));
    const notes = [r.scored === false && "left out of the loss", r.ended === false && "without an end"].filter(Boolean).map((text) => make("span", {class: "note"}, text));
    const head = make("p", {class: "facts"}, facts, notes), long = prompt.length > 160 || /\n/.test(prompt);
    const asked = long ? make("details", {class: "prompt"}, make("summary", {}, plain(prompt.slice(0, 120)).replace(/\n/g, "↵") + " …"), make("p", {class: "tokens"}, plain(prompt))) : make("p", {class: "prompt"}, plain(prompt));
    return make("section", {class: "response"}, asked, head, r.roles ? turns(r) : strip(r));
  }
  const turns = (r) => make("div", {}, r.tokens.map((text, t) => make("p", {class: `tokens ${r.own[t] === "1" ? "" : "other"}`}, make("b", {}, plain(r.roles[t])), ` ${plain(text)}`)));
  function strip(r) {
    if (!r.told) return make("p", {class: "tokens", dir: "ltr"}, plain(r.tokens.join("")));
    const look = (t) => {
      const value = VALUE[state.colour](r.numbers, t) ?? 0;
      return {value, most: strip.most, kind: r.own[t] !== "1" ? "other" : r.numbers.clipped?.[t] ? "clipped" : ""};
    };
    const e = tokenStrip(r.tokens, look, (t) => { strips.forEach((s) => { if (s !== e) s.leave(); }); tell(r, t); }, "response, token by token: arrow keys");
    strips.push(e);
    return e;
  }
  function paint() {
    const all = responses.flatMap((r) => r.where.map((t) => Math.abs(VALUE[state.colour](r.numbers, t) ?? 0))).filter(Number.isFinite).sort((a, b) => a - b);
    strip.most = all[Math.floor(0.98 * (all.length - 1))] || all.at(-1);
    strips.forEach((s) => s.update());
  }
  function tell(r, t) {
    const x = r.numbers, own = r.own[t] === "1";
    const facts = own ? [["log π sampler", x.sampler[t]], ["log π policy", x.policy[t]], ["log π reference", x.reference[t]], ["ratio", x.ratio?.[t]], ["advantage", x.advantage[t]], ["weight in the gradient", x.push?.[t]]] : [];
    detail.replaceChildren(make("b", {}, `token ${t + 1} of ${r.tokens.length}: `, make("span", {class: "token"}, plain(r.tokens[t]).replace(/\n/g, "↵") || "(part of a character)")),
      make("dl", {}, facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {"data-value": value}, digits(value, 6))))),
      make("span", {}, !own ? r.scored === false ? "The response is left out of the loss." : "The environment wrote it: it has no part in the loss." : x.clipped?.[t] ? "clipped: no gradient" : ""));
    detail.hidden = false;
  }

  const iteration = dial("iteration", {min: 0, max: records.length - 1, step: 1, value: state.at, text: (i) => String(records[i].iteration)}, open);
  const set = (changes) => { Object.assign(state, changes); recompute(); };
  const lowDial = dial("ε below", {min: 1e-4, max: 1, step: 1e-4, value: 0.2, text: (x) => digits(x, 3)}, (low) => set({low}));
  const highDial = dial("ε above", {min: 1e-4, max: 4, step: 1e-4, value: 0.2, text: (x) => digits(x, 3)}, (high) => set({high}));
  const betaDial = dial("β of the KL in the loss", {min: 0, max: 0.5, step: 0.001, value: 0, text: (x) => digits(x, 3)}, (beta) => set({beta}));
  const variants = Object.fromEntries(Object.keys(VARIANTS).map((name) => [name, name + (name === settings.variant ? " (this run)" : "")]));
  const modes = {"": "of the variant", ...Object.fromEntries(AGGREGATIONS.map((name) => [name, name]))};
  const sorts = Object.fromEntries(Object.entries(SORTS).filter(([name]) => name === "order" || records.some(({responses}) => responses.map(prepared).some((r) => r[name] != null))));
  box.append(make("h1", {}, plain(run.title)), ...run.lacks.map((text) => make("p", {class: "note"}, plain(text))),
    ...settings.variant && !known ? [make("p", {class: "note"}, `The page does not know the variant ${plain(settings.variant)} of this run: the weights are those of another.`)] : [],
    make("div", {class: "panes small"}, curves.map(({svg}) => svg)),
    make("div", {class: "dials"}, records.length > 1 ? iteration : "", menu("sort by", sorts, "order", (sort) => { state.sort = sort; arrange(); }), toggle("lowest first", false, (up) => { state.up = up; arrange(); }),
      told ? menu("colour", COLOURS, "push", (colour) => { state.colour = colour; paint(); }) : ""),
    told ? make("div", {class: "dials"}, menu("variant", variants, state.variant, (variant) => set({variant, low: null, high: null})), menu("aggregation", modes, "", (aggregation) => set({aggregation})), lowDial, highDial, betaDial) : "",
    about, ...told ? [make("p", {class: "key"}, make("span", {class: "token up"}, "up"), " made likelier ", make("span", {class: "token down"}, "down"), " made rarer ", make("span", {class: "token clipped"}, "clipped"),
      " no gradient ", make("span", {class: "token other"}, "environment"), " not the model's own. Choose a token for its numbers.")] : [], list, detail);
  open(state.at);
  return {state, open, set, responses: () => responses, options};
}
