'use strict';
/* The page of the HTTP port. It asks the same paths that every client has: /v1/models,
 * /v1/chat/completions, /v1/completions, /v1/status, /metrics. Whatever comes from a model or a
 * server is put in as text (textContent), never as HTML. */
(() => {
  const $ = (id) => document.getElementById(id);
  const SAVED = 'tandem-talk', KEY = 'tandem-key';
  const POLL_MS = 2000, RATE_POINTS = 60, MAX_RETRIES = 5, SAVE_MS = 1000;
  const settings = ['kind', 'model', 'max_tokens', 'temperature', 'top_p', 'top_k', 'seed',
    'stop_at', 'alternatives', 'system'];

  /* turns: {role, text, tokens: [{text, logprob, top}], end}; running: {path, body, at} of the
   * answer that is being written, at = the id behind which its stream goes on */
  let turns = [], running = null, stopper = null, pausedPoll = null;

  const make = (tag, text, className) => {
    const e = document.createElement(tag);
    if (text !== undefined) e.textContent = text;
    if (className) e.className = className;
    return e;
  };
  const replace = (e, children) => e.replaceChildren(...children);

  /* ---- what is kept over a reload, in this tab ------------------------------------------- */

  let savedAt = 0;
  const save = () => {
    savedAt = performance.now();
    const s = { turns, running, settings: {} };
    for (const id of settings) s.settings[id] = $(id).value;
    try { sessionStorage.setItem(SAVED, JSON.stringify(s)); } catch { /* full, or not allowed */ }
  };
  /* The whole talk is written each time, so not for each token of a long answer. The page saves as
   * it leaves, too; a tab that is killed begins where it last saved, and the stream goes on there. */
  const saveSometimes = () => { if (performance.now() - savedAt >= SAVE_MS) save(); };
  const load = () => {
    try {
      const s = JSON.parse(sessionStorage.getItem(SAVED) || '{}');
      turns = Array.isArray(s.turns) ? s.turns : [];
      running = s.running || null;
      for (const id of settings) if (s.settings && id in s.settings) $(id).value = s.settings[id];
      return s.settings || {};
    } catch { return {}; }
  };

  /* ---- calls ------------------------------------------------------------------------------ */

  const headers = (more) => {
    const key = sessionStorage.getItem(KEY);
    return { ...(key ? { Authorization: 'Bearer ' + key } : {}), ...more };
  };
  class Refused extends Error {
    constructor(status, message) { super(message); this.status = status; }
  }
  const refused = async (r) => {
    let why = r.status + ' ' + r.statusText;
    try { why = (await r.json()).error.message || why; } catch { /* not JSON */ }
    return new Refused(r.status, why);
  };
  const get = async (path) => {
    const r = await fetch(path, { headers: headers(), cache: 'no-store' });
    if (r.status === 401) askKey();
    if (!r.ok) throw await refused(r);
    return r;
  };
  const askKey = () => {
    $('key-form').hidden = false;
    $('key-note').textContent = sessionStorage.getItem(KEY) ? 'This key is not accepted.'
      : 'This router serves tenants: give a key.';
  };
  const tell = (text) => { $('problem').textContent = text; $('problem').hidden = !text; };

  /* ---- the talk ----------------------------------------------------------------------------- */

  const chance = (logprob) => (100 * Math.exp(logprob)).toFixed(1) + ' %';
  const visible = (text) => text.replace(/\n/g, '\u21b5').replace(/ /g, '\u2423') || '\u2205';
  const showToken = (span) => {
    for (const s of document.querySelectorAll('.chosen')) s.classList.remove('chosen');
    const t = span && span.token;
    $('token').hidden = !t;
    if (!t) return;
    span.classList.add('chosen');
    $('token-text').textContent = '\u201c' + visible(t.text) + '\u201d';
    const rows = t.top.some((x) => x.text === t.text) ? t.top
      : [{ text: t.text, logprob: t.logprob }, ...t.top];
    rows.sort((x, y) => y.logprob - x.logprob);
    replace($('token-rows'), rows.map((x) => {
      const row = make('tr');
      const name = make('td');
      name.append(make('code', visible(x.text)), x.text === t.text ? ' (taken)' : '');
      row.append(name, make('td', chance(x.logprob)));
      return row;
    }));
  };
  const spanOf = (token) => {
    const s = make('span', token.text);
    if (token.top) s.token = token;
    return s;
  };
  const itemOf = (turn) => {
    const li = make('li', undefined, turn.role);
    li.append(make('span', turn.role === 'user' ? 'You' : turn.role === 'assistant' ? 'Model'
      : 'Prompt', 'who'));
    const body = make('span', undefined, 'tokens');
    if (turn.tokens && turn.tokens.length) {
      body.append(...turn.tokens.map(spanOf));
      body.tabIndex = 0;
      body.setAttribute('aria-label', turn.text + ' (arrow keys go through its tokens)');
      body.setAttribute('role', 'group');
    } else {
      body.textContent = turn.text;
    }
    li.append(body);
    if (turn.end) li.append(make('span', turn.end, 'end'));
    return li;
  };
  const draw = () => { replace($('talk'), turns.map(itemOf)); };

  /* A whole sentence at a time: single tokens are no speech. */
  let unspoken = '';
  const speak = (text, isEnd) => {
    unspoken += text;
    const ends = ['. ', '! ', '? ', '\n'].map((x) => unspoken.lastIndexOf(x));
    const end = isEnd ? unspoken.length : Math.max(...ends) + 1;
    if (end <= 0) return;
    $('spoken').append(make('p', unspoken.slice(0, end)));
    unspoken = unspoken.slice(end);
    while ($('spoken').children.length > 20) $('spoken').firstChild.remove();
  };

  /* ---- one answer --------------------------------------------------------------------------- */

  const number = (id) => $(id).value === '' ? undefined : Number($(id).value);
  const ask = () => {
    const alternatives = number('alternatives') || 0, isChat = $('kind').value === 'chat';
    const body = {
      model: $('model').value || undefined, stream: true, max_tokens: number('max_tokens'),
      stream_options: { include_usage: true, include_event_ids: true, include_ledger: true },
      temperature: number('temperature'), top_p: number('top_p'), top_k: number('top_k'),
      seed: number('seed'), stop: $('stop_at').value || undefined
    };
    if (isChat) {
      const system = $('system').value;
      body.messages = turns.map((t) => (
        { role: t.role === 'prompt' ? 'user' : t.role, content: t.text }));
      if (system) body.messages.unshift({ role: 'system', content: system });
      if (alternatives) Object.assign(body, { logprobs: true, top_logprobs: alternatives });
    } else {
      body.prompt = turns[turns.length - 1].text;
      if (alternatives) body.logprobs = alternatives;
    }
    return { path: isChat ? '/v1/chat/completions' : '/v1/completions', body, at: '' };
  };

  /* The event's tokens with their alternatives; the event's text as one token when they do not
   * make it up (a character of several tokens). */
  const tokensOf = (choice, text) => {
    const l = choice.logprobs;
    let tokens = [];
    if (l && l.content)
      tokens = l.content.map((t) => ({
        text: t.token, logprob: t.logprob,
        top: (t.top_logprobs || []).map((x) => ({ text: x.token, logprob: x.logprob }))
      }));
    else if (l && l.tokens)
      tokens = l.tokens.map((t, i) => ({
        text: t, logprob: l.token_logprobs[i],
        top: Object.entries((l.top_logprobs && l.top_logprobs[i]) || {})
          .map(([k, v]) => ({ text: k, logprob: v })).sort((x, y) => y.logprob - x.logprob)
      }));
    if (tokens.length && tokens.map((t) => t.text).join('') === text) return tokens;
    return text ? [tokens.length === 1 ? { ...tokens[0], text } : { text }] : [];
  };

  const ms = (x) => x >= 1000 ? (x / 1000).toFixed(2) + ' s' : x.toFixed(x < 10 ? 2 : 0) + ' ms';
  const bytes = (n) => n < 10240 ? n + ' bytes' : n < 1e7 ? (n / 1024).toFixed(0) + ' KiB'
    : (n / 1048576).toFixed(0) + ' MiB';

  /* Where the answer is: the router's first event is prefill's token, the next one is decode's. In
   * between the KV is handed over. at: an index of places, or its length when all is over. */
  const places = ['at-router', 'at-prefill', 'at-handover', 'at-decode'];
  const showPlace = (at, text) => {
    places.forEach((id, i) => {
      $(id).className = i < at ? 'was' : i === at ? 'now' : '';
      if (i === at) $(id).setAttribute('aria-current', 'step');
      else $(id).removeAttribute('aria-current');
    });
    $('path-text').textContent = text;
    $('request').hidden = false;
  };

  const timing = { begin: 0, first: 0, last: 0, usage: null, ledger: null, nTokens: 0 };
  /* The stages of the ledger one after the other: those of TTFT, the hand-over, the steps. */
  const stages = (l) => [
    ['a', 'router queue', l.router_queue_us], ['b', 'room on decode', l.reserve_us],
    ['c', 'prefill queue', l.prefill_queue_us], ['d', 'prefill', l.prefill_us],
    ['e', 'calls', l.rpc_us], ['f', 'KV not hidden', l.transfer_exposed_us],
    ['g', 'decode queue', l.decode_queue_us],
    ['h', 'decode steps', l.e2e_us - l.ttft_us - l.transfer_exposed_us - l.decode_queue_us]
  ].map(([c, what, us]) => [c, what, Math.max(us, 0) / 1000]);
  const showTiming = () => {
    const n = timing.usage ? timing.usage.completion_tokens : 0, l = timing.ledger;
    const ttft = timing.first - timing.begin, rest = timing.last - timing.first;
    if (!timing.first) {
      $('request').hidden = true;
      return;
    }
    $('timing').textContent = 'first token ' + ttft.toFixed(0) + ' ms' +
      (n > 1 ? ', ' + n + ' tokens, ' + (rest / (n - 1)).toFixed(2) + ' ms each' : '');
    const parts = l ? stages(l) : [['a', 'to the first token', ttft], ['b', 'further tokens', rest]];
    showPlace(l ? places.length : -1, l
      ? 'The ledger: TTFT ' + ms(l.ttft_us / 1000) + ', all ' + ms(l.e2e_us / 1000) + '. KV: ' +
        bytes(l.transfer_bytes) + ' by ' + l.transfer_path + ' in ' + ms(l.transfer_us / 1000) +
        (l.failovers ? '. Failovers: ' + l.failovers : '')
      : 'As this browser saw it: the answer has no ledger.');
    replace($('request-bar'), parts.map(([c, what, x]) => {
      const i = make('i', undefined, c);
      i.style.flexGrow = String(Math.max(x, 0.001));
      i.title = what + ' ' + ms(x);
      return i;
    }));
    $('request-bar').setAttribute('aria-label',
      parts.map(([, what, x]) => what + ' ' + ms(x)).join(', '));
    replace($('request-legend'), parts.map(([c, what, x]) => {
      const li = make('li');
      li.append(make('i', undefined, c), what + ' ' + ms(x));
      return li;
    }));
  };

  /* One event of the stream. Returns true at the end. */
  const take = (data, id, turn, body) => {
    if (data === '[DONE]') return true;
    const m = JSON.parse(data);
    if (m.error) throw new Refused(m.error.code || 500, m.error.message);
    if (m.usage) timing.usage = m.usage;
    if (m.ledger) timing.ledger = m.ledger;
    const choice = m.choices && m.choices[0];
    if (choice) {
      const text = choice.text !== undefined ? choice.text
        : (choice.delta && choice.delta.content) || '';
      const now = performance.now();
      if (text) {
        if (!timing.first) timing.first = now;
        timing.last = now;
        if (++timing.nTokens === 1) showPlace(2, 'The first token is here; its KV goes to decode.');
        else if (timing.nTokens === 2) showPlace(3, 'Decode writes the answer.');
        const tokens = tokensOf(choice, text);
        turn.text += text;
        turn.tokens.push(...tokens);
        body.append(...tokens.map(spanOf));
        speak(text, false);
      }
      if (choice.finish_reason && choice.finish_reason !== 'stop')
        turn.end = choice.finish_reason === 'length' ? '(the most tokens are reached)'
          : '(' + choice.finish_reason + ')';
    }
    if (id) running.at = id;
    return false;
  };

  /* Server-sent events: blocks of "id:" and "data:" lines. */
  const read = async (response, turn, body) => {
    const reader = response.body.getReader(), decoder = new TextDecoder();
    let rest = '';
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return false; /* without [DONE]: the connection was cut */
      rest += decoder.decode(value, { stream: true });
      let at;
      while ((at = rest.indexOf('\n\n')) >= 0) {
        let data = '', id = '';
        for (const line of rest.slice(0, at).split('\n')) {
          if (line.startsWith('data:')) data += line.slice(5).trimStart();
          if (line.startsWith('id:')) id = line.slice(3).trim();
        }
        rest = rest.slice(at + 2);
        if (data && take(data, id, turn, body)) return true;
      }
      saveSometimes();
    }
  };

  const wait = (ms) => new Promise((go) => setTimeout(go, ms));
  const connect = (signal) => fetch(running.path, {
    method: 'POST', signal, body: JSON.stringify(running.body),
    headers: headers({
      'Content-Type': 'application/json',
      ...(running.at ? { 'Last-Event-ID': running.at } : {})
    })
  });
  /* Until the answer is whole. A stream that is cut goes on behind the last event that is here. */
  const follow = async (turn, body, signal) => {
    for (let n = 0; ; n++) {
      const had = turn.text.length;
      let why = new TypeError('the stream is cut each time');
      try {
        const r = await connect(signal);
        if (r.status === 401) askKey();
        if (!r.ok) throw await refused(r);
        if (await read(r, turn, body)) return;
      } catch (e) {
        const mayHelp = e instanceof TypeError || e.status === 503;
        if (e.name === 'AbortError' || !mayHelp) throw e;
        why = e;
      }
      if (turn.text.length > had) n = 0;
      if (n >= MAX_RETRIES) throw why;
      $('timing').textContent = 'the stream was cut; going on \u2026';
      await wait(Math.min(250 * 2 ** n, 4000));
      if (signal.aborted) throw new DOMException('stopped', 'AbortError');
    }
  };

  const busy = (on) => {
    $('send').disabled = $('reset').disabled = on;
    $('stop').disabled = !on;
    $('talk').setAttribute('aria-busy', String(on));
  };
  const answer = async (turn) => {
    const li = itemOf(turn), body = li.querySelector('.tokens');
    if ($('talk').children.length < turns.length) $('talk').append(li);
    else $('talk').lastChild.replaceWith(li);
    Object.assign(timing, {
      begin: performance.now(), first: 0, last: 0, usage: null, ledger: null,
      nTokens: running.at ? 2 : 0
    });
    replace($('request-bar'), []);
    replace($('request-legend'), []);
    if (running.at) showPlace(3, 'The answer goes on.');
    else showPlace(1, 'Sent: it waits in the router\u2019s queue, then prefill computes the prompt.');
    stopper = new AbortController();
    busy(true);
    tell('');
    try {
      await follow(turn, body, stopper.signal);
    } catch (e) {
      if (e.name === 'AbortError') turn.end = '(stopped)';
      else tell(e instanceof Refused ? e.message : 'The router cannot be reached: ' + e.message);
      if (!turn.text) { /* the turn did not happen: the text is there to send again */
        turns.pop();
        const asked = turns.pop();
        if (asked && !$('prompt').value) $('prompt').value = asked.text;
      } else if (!turn.end) {
        turn.end = '(cut off)';
      }
    }
    stopper = running = null;
    busy(false);
    speak('', true);
    showTiming();
    draw();
    save();
  };
  const send = () => {
    const text = $('prompt').value;
    if (!text || stopper) return;
    const isChat = $('kind').value === 'chat';
    turns.push({ role: isChat ? 'user' : 'prompt', text });
    running = ask();
    $('prompt').value = '';
    draw();
    const turn = { role: 'assistant', text: '', tokens: [], end: '' };
    turns.push(turn);
    save();
    answer(turn);
  };

  /* ---- the cluster -------------------------------------------------------------------------- */

  /* Prometheus' text: [{name, labels, value}]. */
  const parseMetrics = (text) => {
    const rows = [];
    for (const line of text.split('\n')) {
      const m = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
      if (!m) continue;
      const labels = {};
      for (const [, k, v] of (m[2] || '').matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[k] = v;
      rows.push({ name: m[1], labels, value: Number(m[3]) });
    }
    return rows;
  };
  const sum = (rows, name, labels) => rows.filter((r) => r.name === name &&
    Object.entries(labels || {}).every(([k, v]) => r.labels[k] === v))
    .reduce((n, r) => n + r.value, 0);
  const tile = (name, value) => {
    const d = make('div');
    d.append(make('dt', name), make('dd', value));
    return d;
  };
  const percent = (x) => (100 * x).toFixed(1) + ' %';
  const drawTiles = (s, rows) => {
    const held = 'vllm:kv_cache_usage_perc', kv = rows.filter((r) => r.name === held);
    replace($('tiles'), [
      tile('requests / s', s.arrival_rate.toFixed(2)), tile('running', String(s.live)),
      tile('waiting', String(s.queued)),
      tile('KV held', kv.length ? percent(sum(rows, held) / kv.length) : '\u2013'),
      tile('objectives met', s.attainment >= 0 ? percent(s.attainment) : 'none asked'),
      tile('bound by', s.bound || '\u2013'), tile('finished', String(s.finished)),
      tile('failed', String(s.failed)), tile('failovers', String(s.failovers))]);
  };
  const workerItem = (w, i) => {
    const li = make('li', undefined, w.state);
    li.append(make('div', (w.name || w.role + ' ' + (i + 1)) + ' \u2013 ' + w.state));
    if (w.kv_blocks) {
      const bar = make('div', undefined, 'bar');
      const held = w.kv_blocks_held / w.kv_blocks, cached = w.kv_blocks_cached / w.kv_blocks;
      const parts = [['a', held], ['b', cached], ['', Math.max(0, 1 - held - cached)]];
      bar.append(...parts.map(([c, share]) => {
        const x = make('i', undefined, c);
        x.style.flexGrow = String(share);
        return x;
      }));
      li.append(bar, make('div', 'KV ' + percent(held) + ' held, ' + percent(cached) + ' cached; ' +
        w.running + ' running, ' + w.waiting + ' waiting' +
        (w.transfers ? ', ' + w.transfers + ' hand-overs' : ''), 'quiet'));
      const moved = w.role === 'prefill' ? w.kv_bytes_sent : w.kv_bytes_received;
      li.append(make('div', (w.role === 'prefill' ? 'KV sent ' : 'KV received ') + bytes(moved),
        'quiet'));
    }
    return li;
  };
  const drawWorkers = (s, rows) => {
    replace($('workers'), ['prefill', 'decode'].map((role) => {
      const card = make('div', undefined, 'card'), list = make('ul', undefined, 'workers');
      const of = s.workers.filter((w) => w.role === role);
      const ready = of.filter((w) => w.state === 'ready').length;
      const share = sum(rows, 'td_worker_utilisation', { role }) / Math.max(1, s.models.length);
      card.append(make('h3', role + ': ' + ready + ' of ' + of.length + ' ready, ' +
        (100 * share).toFixed(0) + ' % busy'));
      list.append(...of.map(workerItem));
      card.append(list);
      return card;
    }));
    $('withheld').hidden = !s.withheld;
  };

  const rates = [];
  const drawRate = (s) => {
    rates.push(s.arrival_rate);
    if (rates.length > RATE_POINTS) rates.shift();
    const top = Math.max(...rates, 0.1);
    const line = document.createElementNS('http://www.w3.org/2000/svg', 'polyline');
    const x = (i) => 240 * (RATE_POINTS - rates.length + i + 1) / RATE_POINTS;
    line.setAttribute('points', rates.map((r, i) =>
      x(i).toFixed(1) + ',' + (38 - 36 * r / top).toFixed(1)).join(' '));
    replace($('rate'), [line]);
    $('rate-text').textContent = 'now ' + s.arrival_rate.toFixed(2) + ', most ' +
      Math.max(...rates).toFixed(2);
  };

  /* A histogram's buckets as bars, from the first to the last that holds something. */
  const histogram = (rows, name, title, p50, p99) => {
    const buckets = new Map();
    for (const r of rows)
      if (r.name === name + '_bucket')
        buckets.set(r.labels.le, (buckets.get(r.labels.le) || 0) + r.value);
    const upTo = [...buckets].map(([le, n]) => ({ le: le === '+Inf' ? Infinity : Number(le), n }))
      .sort((x, y) => x.le - y.le);
    let before = 0, bars = upTo.map((b) => {
      const n = b.n - before;
      before = b.n;
      return { le: b.le, n };
    });
    const card = make('div', undefined, 'card');
    card.append(make('h3', title + (before
      ? ': ' + ms(p50) + ' median, ' + ms(p99) + ' 99th percentile' : ': nothing yet')));
    let first = bars.findIndex((b) => b.n), last = bars.length - 1;
    if (first < 0) return card;
    while (!bars[last].n) last--;
    while (last - first < 7 && (first > 0 || last < bars.length - 1)) { /* empty ones beside it */
      if (first > 0) first--;
      if (last - first < 7 && last < bars.length - 1) last++;
    }
    bars = bars.slice(first, last + 1);
    const most = Math.max(...bars.map((b) => b.n)), box = make('div', undefined, 'histogram');
    const edge = (x) => x === Infinity ? 'more' : '\u2264 ' + ms(1000 * x);
    box.setAttribute('role', 'img');
    box.setAttribute('aria-label', bars.map((b) => edge(b.le) + ': ' + b.n).join('; '));
    box.append(...bars.map((b) => {
      const i = make('i');
      i.style.height = (100 * b.n / most) + '%';
      i.title = edge(b.le) + ': ' + b.n;
      return i;
    }));
    const axis = make('div', undefined, 'axis quiet');
    axis.append(make('span', edge(bars[0].le)), make('span', edge(bars[bars.length - 1].le)));
    card.append(box, axis);
    return card;
  };
  const drawLatencies = (s, rows) => {
    const m = s.models.reduce((x, y) => y.ttft_p99_ms > x.ttft_p99_ms ? y : x, s.models[0] ||
      { ttft_p50_ms: 0, ttft_p99_ms: 0, tpot_p50_ms: 0, tpot_p99_ms: 0 });
    replace($('latencies'), [
      histogram(rows, 'td_time_to_first_token_seconds', 'Time to first token',
        m.ttft_p50_ms, m.ttft_p99_ms),
      histogram(rows, 'td_time_per_output_token_seconds', 'Time per output token',
        m.tpot_p50_ms, m.tpot_p99_ms)]);
  };
  /* Objectives met by each SLO class, of all models together. */
  const classCards = (s) => {
    const classes = new Map();
    for (const c of s.models.flatMap((m) => m.classes)) {
      const sums = classes.get(c.name) || { judged: 0, good: 0 };
      classes.set(c.name, { judged: sums.judged + c.judged, good: sums.good + c.good });
    }
    if (!classes.size) return [];
    const card = make('div', undefined, 'card'), list = make('ul');
    list.className = 'classes';
    list.append(...[...classes].map(([name, c]) => {
      const li = make('li'), bar = make('div', undefined, 'bar'), share = c.good / (c.judged || 1);
      li.append(make('div', name + ': ' + (c.judged
        ? percent(share) + ' of ' + c.judged + ' met their objectives' : 'none finished yet')));
      for (const [kind, part] of [['b', share], ['', 1 - share]]) {
        const x = make('i', undefined, kind);
        x.style.flexGrow = String(part);
        bar.append(x);
      }
      if (c.judged) li.append(bar);
      return li;
    }));
    card.append(make('h3', 'SLO classes'), list);
    return [card];
  };

  const drawModels = (s) => {
    if (s.models.length < 2 && !s.models.some((m) => m.judged)) {
      replace($('models'), []);
      return;
    }
    const card = make('div', undefined, 'card'), table = make('table');
    const body = make('tbody'), head = make('tr');
    head.append(...['model', 'running', 'waiting', 'objectives met'].map((x) => {
      const th = make('th', x);
      th.scope = 'col';
      return th;
    }));
    table.append(head, body);
    body.append(...s.models.map((m) => {
      const row = make('tr');
      row.append(make('td', m.name), make('td', String(m.live)), make('td', String(m.queued)),
        make('td', m.judged ? percent(m.good / m.judged) : 'none asked'));
      return row;
    }));
    card.append(make('h3', 'Models'), table);
    replace($('models'), [card, ...classCards(s)]);
  };

  const poll = async () => {
    if (document.hidden) return;
    try {
      const s = await (await get('/v1/status')).json();
      let rows = [];
      try {
        rows = parseMetrics(await (await get('/metrics')).text());
      } catch { /* tiles without them */ }
      drawTiles(s, rows);
      drawWorkers(s, rows);
      drawRate(s);
      drawLatencies(s, rows);
      drawModels(s);
      $('served').textContent = s.models.map((m) => m.name).join(', ') + ' \u2013 ' + s.mode +
        ', ' + s.policy;
      $('freshness').textContent = '';
    } catch (e) {
      $('freshness').textContent = e.status === 401 ? '(a key is needed)'
        : '(no answer: ' + e.message + ')';
    }
  };
  let lastPoll = 0;
  const pollAgain = async () => { /* of several that wait for an answer, the last one goes on */
    const mine = ++lastPoll;
    clearTimeout(pausedPoll);
    await poll();
    if (mine === lastPoll) pausedPoll = setTimeout(pollAgain, POLL_MS);
  };

  const loadModels = async (kept) => {
    try {
      const all = (await (await get('/v1/models')).json()).data;
      const models = all.filter((m) => !m.root); /* an alias' root is its model */
      replace($('model'), models.map((m) => {
        const o = make('option', m.id);
        o.value = m.id;
        return o;
      }));
      if (models.some((m) => m.id === kept)) $('model').value = kept;
      if (sessionStorage.getItem(KEY)) $('key-note').textContent = 'This key is used.';
    } catch (e) {
      if (e.status !== 401) tell(e.message);
    }
  };

  /* ---- what the user does ----------------------------------------------------------------- */

  $('ask').addEventListener('submit', (e) => { e.preventDefault(); send(); });
  $('prompt').addEventListener('keydown', (e) => {
    if (e.key === 'Enter' && !e.shiftKey && !e.isComposing) { e.preventDefault(); send(); }
  });
  const stop = () => { if (stopper) stopper.abort(); };
  $('stop').addEventListener('click', () => { stop(); $('prompt').focus(); });
  document.addEventListener('keydown', (e) => { if (e.key === 'Escape') stop(); });
  $('reset').addEventListener('click', () => {
    turns = [];
    tell('');
    showToken(null);
    draw();
    save();
    $('prompt').focus();
  });
  $('settings').addEventListener('change', save);
  $('talk').addEventListener('mouseover', (e) => { if (e.target.token) showToken(e.target); });
  $('talk').addEventListener('click', (e) => { if (e.target.token) showToken(e.target); });
  $('talk').addEventListener('keydown', (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 }[e.key];
    if (!step || !e.target.classList.contains('tokens')) return;
    const spans = [...e.target.children].filter((s) => s.token);
    const at = spans.findIndex((s) => s.classList.contains('chosen'));
    const to = spans[Math.min(Math.max(at + step, 0), spans.length - 1)];
    e.preventDefault();
    if (!to) return;
    showToken(to);
    $('spoken').append(make('p', to.token.text + ' ' + chance(to.token.logprob)));
  });
  $('key-form').addEventListener('submit', (e) => {
    e.preventDefault();
    sessionStorage.setItem(KEY, $('key').value.trim());
    $('key').value = '';
    $('key-note').textContent = '';
    loadModels($('model').value);
    pollAgain();
  });
  document.addEventListener('visibilitychange', () => { if (!document.hidden) pollAgain(); });
  addEventListener('pagehide', save);

  const kept = load();
  draw();
  loadModels(kept.model);
  pollAgain();
  if (running && turns.length) { /* a reload in the middle of an answer: it goes on */
    const turn = turns[turns.length - 1];
    answer(turn);
  }
})();
