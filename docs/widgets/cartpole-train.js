// CartPole and five algorithms that learn it, in one function: a worker is made of its source.

function cartpole(chance) {
  const EPISODES = 5, UPDATES = 30, LIMIT = 500, PARTS = 4, GAMMA = 0.99, H = 32;
  const POLICY = 0, VALUE = 4 * H + H + 2 * H + 2, SIZE = VALUE + 4 * H + H + H + 1;   // where the weights of each network begin

  // A state is the cart's place and speed, the pole's angle and its speed. True if the pole falls or the cart leaves the track.
  const start = (random) => Float64Array.from({length: 4}, () => 0.1 * random() - 0.05);
  function push(s, action) {
    const cos = Math.cos(s[2]), sin = Math.sin(s[2]), force = ((action ? 10 : -10) + 0.05 * s[3] * s[3] * sin) / 1.1;
    const turn = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos * cos / 1.1)), pull = force - 0.05 * turn * cos / 1.1;
    s[0] += 0.02 * s[1]; s[1] += 0.02 * pull; s[2] += 0.02 * s[3]; s[3] += 0.02 * turn;
    return Math.abs(s[0]) > 2.4 || Math.abs(s[2]) > Math.PI / 15;
  }

  // A network of one hidden layer: out = b2 + W2 tanh(b1 + W1 x), x the four numbers from `row` on; its weights stand in `w` from `at` on.
  // Its last layer has two rows (logits) or one (a value): `out[1]` is there or not.
  function forward(w, at, x, row, h, out) {
    const outs = out.length, b1 = at + 4 * H, w2 = b1 + H, b2 = w2 + outs * H, [x0, x1, x2, x3] = [x[row], x[row + 1], x[row + 2], x[row + 3]];
    let first = w[b2], second = outs > 1 ? w[b2 + 1] : 0;
    for (let j = 0, i = at; j < H; j++, i += 4) {
      const y = 1 - 2 / (Math.exp(2 * (w[b1 + j] + w[i] * x0 + w[i + 1] * x1 + w[i + 2] * x2 + w[i + 3] * x3)) + 1);
      h[j] = y;
      first += y * w[w2 + j];
      if (outs > 1) second += y * w[w2 + H + j];
    }
    out[0] = first;
    if (outs > 1) out[1] = second;
  }
  // Adds the gradient of the weights to `g`, from that of the outputs.
  function backward(w, g, at, x, row, h, slope) {
    const outs = slope.length, b1 = at + 4 * H, w2 = b1 + H, b2 = w2 + outs * H, [x0, x1, x2, x3] = [x[row], x[row + 1], x[row + 2], x[row + 3]];
    const s = slope[0], z = outs > 1 ? slope[1] : 0;
    g[b2] += s;
    if (outs > 1) g[b2 + 1] += z;
    for (let j = 0, i = at; j < H; j++, i += 4) {
      const y = h[j];
      let d = s * w[w2 + j];
      g[w2 + j] += s * y;
      if (outs > 1) { d += z * w[w2 + H + j]; g[w2 + H + j] += z * y; }
      d *= 1 - y * y;
      g[b1 + j] += d; g[i] += d * x0; g[i + 1] += d * x1; g[i + 2] += d * x2; g[i + 3] += d * x3;
    }
  }
  function weights(random) {
    const w = new Float64Array(SIZE), fill = (from, n, bound) => { for (let i = from; i < from + n; i++) w[i] = bound * (2 * random() - 1); };
    fill(POLICY, 5 * H, 1 / 2); fill(POLICY + 5 * H, 2 * H + 2, 1 / Math.sqrt(H));
    fill(VALUE, 5 * H, 1 / 2); fill(VALUE + 5 * H, H + 1, 1 / Math.sqrt(H));
    return w;
  }
  const hidden = new Float64Array(H), two = new Float64Array(2), one = new Float64Array(1);
  function value(w, x, row = 0) { forward(w, VALUE, x, row, hidden, one); return one[0]; }
  // The log-odds of the action 1, and the log-probability of an action.
  function odds(w, x, row = 0) { forward(w, POLICY, x, row, hidden, two); return two[1] - two[0]; }
  const logp = (z, action) => -Math.log1p(Math.exp(action ? -z : z));

  // A few episodes: observations, actions, their log-probabilities, and where each ends (1: fell, 2: the clock ran out).
  function collect(w, random, fault) {
    const obs = [], actions = [], old = [], ends = [], last = [];
    for (let episode = 0; episode < EPISODES; episode++) {
      const s = start(random);
      for (let t = 1, end = 0; !end; t++) {
        const z = odds(w, s), action = +(random() < 1 / (1 + Math.exp(-z)));
        if (fault !== "buffer") obs.push(...s);
        const fell = push(s, action);
        if (fault === "buffer") obs.push(...s);
        end = fell ? 1 : t === LIMIT ? 2 : 0;
        actions.push(action); old.push(logp(z, action)); ends.push(end);
        if (end) last.push(value(w, s));
      }
    }
    return {obs: Float64Array.from(obs), actions, old, ends, last, n: actions.length};
  }

  // What each action was worth, and what the value function is to say of its state.
  function credit(w, {obs, ends, last, n}, {rung, lam, fault}) {
    const V = Float64Array.from({length: n}, (_, t) => value(w, obs, 4 * t)), A = new Float64Array(n), target = new Float64Array(n);
    for (let t = n - 1, ahead = 0, episode = EPISODES - 1; t >= 0; t--) {
      const end = ends[t];
      if (rung < 3) {
        ahead = target[t] = 1 + GAMMA * (end ? 0 : ahead);
        A[t] = ahead - (rung === 2 ? V[t] : 0);
      } else {
        let next = end ? last[episode] : V[t + 1] ?? 0;
        if (end === 1 && fault !== "bootstrap") next = 0;
        ahead = A[t] = 1 + GAMMA * next - V[t] + (end ? 0 : GAMMA * lam * ahead);
        target[t] = A[t] + V[t];
      }
      if (end) episode--;
    }
    const mean = (x) => x.reduce((a, b) => a + b, 0) / n, spread = (x, m = mean(x)) => Math.sqrt(x.reduce((s, y) => s + (y - m) ** 2, 0) / (n - 1));
    const m = mean(A), scale = rung > 3 ? spread(A) + 1e-8 : 1;
    const explained = 1 - (spread(target.map((y, t) => y - V[t])) / spread(target)) ** 2;
    return {A: A.map((a) => (fault === "sign" ? -1 : 1) * (rung === 1 || rung > 3 ? a - m : a) / scale), target, explained};
  }

  // The gradient of PPO's loss over some rows, -mean(min(r A, clip(r) A)) + mean((V - target)^2) / 4, is added to g.
  const slopes = new Float64Array(2), slope = new Float64Array(1);
  function loss(w, g, rows, {obs, actions, old, A, target}, {rung, eps, fault}) {
    const centre = rows.reduce((s, t) => s + target[t], 0) / rows.length;
    rows.forEach((t, i) => {
      const z = odds(w, obs, 4 * t), a = A[fault === "rows" ? i : t], now = logp(z, actions[t]);
      const ratio = rung < 4 || fault === "again" ? 1 : Math.exp(now - old[t]);
      const flat = rung === 4 && (a > 0 ? ratio > 1 + eps : ratio < 1 - eps);
      slopes[1] = flat ? 0 : -ratio * a * (actions[t] - 1 / (1 + Math.exp(-z))) / rows.length;
      slopes[0] = -slopes[1];
      backward(w, g, POLICY, obs, 4 * t, hidden, slopes);
      if (rung === 1) return;
      slope[0] = (value(w, obs, 4 * t) - (fault === "broadcast" ? centre : target[t])) / 2 / rows.length;
      backward(w, g, VALUE, obs, 4 * t, hidden, slope);
    });
  }

  function adam() { return {m: new Float64Array(SIZE), v: new Float64Array(SIZE), steps: 0}; }
  function step(w, g, {m, v}, rate, t) {
    for (let i = 0; i < SIZE; i++) {
      m[i] += 0.1 * (g[i] - m[i]);
      v[i] += 0.001 * (g[i] * g[i] - v[i]);
      w[i] -= rate * m[i] / (1 - 0.9 ** t) / (Math.sqrt(v[i] / (1 - 0.999 ** t)) + 1e-8);
    }
  }

  // All gradient steps on one batch: one on all of it, or several epochs in parts.
  function update(w, opt, batch, random, settings) {
    const reuse = settings.rung > 3, rows = Array.from({length: batch.n}, (_, t) => t), size = Math.ceil(batch.n / (reuse ? PARTS : 1));
    for (let epoch = 0; epoch < (reuse ? settings.epochs : 1); epoch++) {
      if (reuse) for (let i = batch.n - 1; i > 0; i--) {
        const j = Math.floor(random() * (i + 1));
        [rows[i], rows[j]] = [rows[j], rows[i]];
      }
      for (let from = 0; from < batch.n; from += size) {
        const g = new Float64Array(SIZE);
        loss(w, g, rows.slice(from, from + size), batch, settings);
        step(w, g, opt, settings.rate, ++opt.steps);
      }
    }
  }

  // How far the policy has moved on its batch, as the program's own log says it.
  function moved(w, {obs, actions, old, A, n}, {eps, fault}) {
    const ratios = old.map((was, t) => fault === "again" ? 1 : Math.exp(logp(odds(w, obs, 4 * t), actions[t]) - was));
    return {ratios, kl: ratios.reduce((s, r) => s + r - 1 - Math.log(r), 0) / n,
      clipped: ratios.filter((r, t) => A[t] > 0 ? r > 1 + eps : r < 1 - eps).length / n};
  }

  function* training(seed, settings) {
    const random = chance(seed), w = weights(random), opt = adam();
    for (let i = 0; i < UPDATES; i++) {
      const batch = collect(w, random, settings.fault);
      Object.assign(batch, credit(w, batch, settings));
      update(w, opt, batch, random, settings);
      yield {update: i + 1, w, length: batch.n / EPISODES, explained: batch.explained, ...moved(w, batch, settings)};
    }
  }

  // Steps before the pole falls, if the likelier action is always taken.
  function greedy(w, random, episodes = 10) {
    let steps = 0;
    for (let e = 0; e < episodes; e++) {
      const s = start(random);
      for (let t = 0; t < LIMIT; t++) {
        steps++;
        if (push(s, odds(w, s) > 0 ? 1 : 0)) break;
      }
    }
    return steps / episodes;
  }

  // For a worker: the seeds in turn, an update each; then how well each does without chance.
  function race({seeds, settings}, say) {
    let runs = seeds.map((seed) => ({seed, updates: training(seed, settings)}));
    while (runs.length) runs = runs.filter((run) => {
      const {value, done} = run.updates.next();
      if (done) say({seed: run.seed, greedy: greedy(run.w, chance(run.seed + 1e6))});
      else say({seed: run.seed, ...value});
      run.w ??= value.w;
      return !done;
    });
  }

  return {EPISODES, UPDATES, LIMIT, start, push, odds, value, weights, collect, credit, loss, adam, step, update, moved, training, greedy, race};
}
