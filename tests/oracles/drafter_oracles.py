"""Brute-force float64 definitions of every drafter attention read in the benchmark.

Nothing here is fast and nothing here is vectorised: each output element is built by
plain Python loops over the block offset r (position p = N + r), the query head, and
every entry j the method lets that position read.  The product code is meant to be
tested against these definitions; it must not import them.

Conventions
-----------
* Positions are 0-indexed.  Context entries sit at 0..N-1, block position r at N + r.
  The paper's anchor position t is N (the paper counts from 1: its context is 1..t-1).
* q is [B][Hq][d], context k/v are [N][Hkv][d], block kb/vb are [B][Hkv][d]; all of them
  are UNROTATED and already normalised (q_norm / k_norm applied).
* Rotation follows the 'rotate_half' layout: pair i is (i, i + n) for n = len(inv_freq),
  and dims beyond 2n pass through.  A pair rotated by the angle a*x maps
  (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
* Query head h reads key/value head h // (Hq // Hkv).
* `scale` is the softmax scale: 1/sqrt(d) for Llama/Qwen drafters, 1.0 for the DeepSpec
  Gemma-4 drafters.
* The distance of a pair is (query position) - (key position); the logit at distance x is
      mscale^2 * sum_i [ (q1 k1 + q2 k2) cos(x f_i) - (q2 k1 - q1 k2) sin(x f_i) ]
      + sum over unrotated dims of q k,   all times `scale`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

NEG_INF = float("-inf")


# --------------------------------------------------------------------------- inputs


def _lists(x):
    """Accept torch / numpy / nested lists; bf16 tensors convert exactly."""
    return x.tolist() if hasattr(x, "tolist") else x


@dataclass
class Case:
    q: list
    k: list
    v: list
    kb: list
    vb: list

    @staticmethod
    def of(q, k, v, kb, vb) -> Case:
        return Case(_lists(q), _lists(k), _lists(v), _lists(kb), _lists(vb))

    @property
    def B(self):
        return len(self.q)

    @property
    def N(self):
        return len(self.k)

    @property
    def Hq(self):
        return len(self.q[0])

    @property
    def Hkv(self):
        return len(self.kb[0])

    @property
    def d(self):
        return len(self.q[0][0])

    def kv_head(self, h):
        assert self.Hq % self.Hkv == 0
        return h // (self.Hq // self.Hkv)

    def key(self, src, j, h):
        return (self.k if src == "c" else self.kb)[j][self.kv_head(h)]

    def value(self, src, j, h):
        return (self.v if src == "c" else self.vb)[j][self.kv_head(h)]


# --------------------------------------------------------------------------- rotary


@dataclass(frozen=True)
class Rope:
    inv_freq: tuple
    mscale: float = 1.0  # multiplies cos and sin of both q and k


def rope_default(theta: float, rotary_dim: int) -> Rope:
    """Plain RoPE over the first rotary_dim dims (rotary_dim < d: 'prefix' partial RoPE)."""
    return Rope(tuple(theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2)))


def rope_proportional(theta: float, head_dim: int, fraction: float) -> Rope:
    """Gemma-4 style partial RoPE: exponents over head_dim, the tail pairs never rotate.

    Pairs stay (i, i + head_dim/2); this is NOT rope_default(theta, fraction*head_dim).
    """
    n = int(fraction * head_dim // 2)
    rot = [theta ** (-2.0 * i / head_dim) for i in range(n)]
    return Rope(tuple(rot + [0.0] * (head_dim // 2 - n)))


def yarn_request_factor(P: int, G: int, Q: int, R: float) -> float:
    """Per-request scaling factor: input P, generation limit G, block positions Q, reference R."""
    padded = -(-(P + G + Q) // 256) * 256
    return max(1.0, padded / R)


def yarn_attention_factor(s: float) -> float:
    return 1.0 if s <= 1.0 else 0.1 * math.log(s) + 1.0


def rope_yarn(theta, dim, s, original_len, *, beta_fast=32.0, beta_slow=1.0, truncate=True,
              mscale=None, rotated_pairs=None, total_pairs=None) -> Rope:
    """YaRN frequencies.

    dim is the exponent denominator (rotary_dim, or head_dim for proportional RoPE).
    Pair i makes original_len * f_i / 2pi turns over the original window; pairs with more
    than beta_fast turns keep f_i, those with fewer than beta_slow use f_i / s, and a ramp
    linear in the pair index joins them.  mscale=None: 0.1 ln(s) + 1 on cos and sin.
    """
    def pair_at(turns):
        return dim * math.log(original_len / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low, high = pair_at(beta_fast), pair_at(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    n = dim // 2 if rotated_pairs is None else rotated_pairs
    freqs = []
    for i in range(n):
        f = theta ** (-2.0 * i / dim)
        ramp = min(1.0, max(0.0, (i - low) / (high - low)))
        freqs.append((f / s) * ramp + f * (1.0 - ramp))
    freqs += [0.0] * ((total_pairs or n) - n)
    return Rope(tuple(freqs), yarn_attention_factor(s) if mscale is None else mscale)


def logit(qv, kv, distance, rope: Rope, scale: float) -> float:
    n, d = len(rope.inv_freq), len(qv)
    assert 2 * n <= d
    m2 = rope.mscale * rope.mscale
    terms = []
    for i in range(n):
        a = distance * rope.inv_freq[i]
        c, s = math.cos(a), math.sin(a)
        q1, q2, k1, k2 = qv[i], qv[i + n], kv[i], kv[i + n]
        terms.append(m2 * ((q1 * k1 + q2 * k2) * c - (q2 * k1 - q1 * k2) * s))
    for i in range(2 * n, d):
        terms.append(qv[i] * kv[i])
    return scale * math.fsum(terms)


def rotate(x, position, rope: Rope):
    """x rotated to `position` (with mscale), for use in dot products against raw keys."""
    n = len(rope.inv_freq)
    y = list(x)
    for i in range(n):
        a = position * rope.inv_freq[i]
        c, s = rope.mscale * math.cos(a), rope.mscale * math.sin(a)
        y[i] = x[i] * c - x[i + n] * s
        y[i + n] = x[i + n] * c + x[i] * s
    return y


# --------------------------------------------------------------------------- softmax


def softmax_read(entries, d):
    """entries: [(logit, value vector)] -> (output, log-sum-exp). Empty: (zeros, -inf)."""
    if not entries:
        return [0.0] * d, NEG_INF
    top = max(x for x, _ in entries)
    w = [math.exp(x - top) for x, _ in entries]
    Z = math.fsum(w)
    out = [math.fsum(w[e] * entries[e][1][c] for e in range(len(entries))) / Z for c in range(d)]
    return out, top + math.log(Z)


@dataclass
class Read:
    out: list                                   # [B][Hq][d]
    lse: list                                   # [B][Hq], log of the total mass
    keys: list = field(default_factory=list)    # per r: [(source, index, distance)]
    extra: dict = field(default_factory=dict)


def _single_softmax(case: Case, rope, scale, keys_for, query_mul=lambda r: 1.0) -> Read:
    res = Read([], [])
    for r in range(case.B):
        keys = keys_for(r)
        row_o, row_l = [], []
        for h in range(case.Hq):
            entries = []
            for src, j, dist in keys:
                x = query_mul(r) * logit(case.q[r][h], case.key(src, j, h), dist, rope, scale)
                entries.append((x, case.value(src, j, h)))
            o, lse = softmax_read(entries, case.d)
            row_o.append(o)
            row_l.append(lse)
        res.out.append(row_o)
        res.lse.append(row_l)
        res.keys.append(keys)
    return res


def _block_keys(case, r, block_causal):
    return [("b", i, r - i) for i in range(case.B) if not (block_causal and i > r)]


# --------------------------------------------------------------------------- methods


def dflash(case, rope, scale, *, block_causal=False, block_shift=0, sliding_window=None) -> Read:
    """Original drafter. block_shift moves the whole block forward (Finding 1).

    sliding_window=w keeps keys with p - j < w (the query itself counts as one of the w).
    """
    def keys_for(r):
        p = case.N + r
        ks = []
        for j in range(case.N):
            if sliding_window is not None and not (p - j < sliding_window):
                continue
            ks.append(("c", j, p + block_shift - j))
        return ks + _block_keys(case, r, block_causal)
    return _single_softmax(case, rope, scale, keys_for)


def near_far(case, r, D):
    """Context indices of N_p and F_p for p = N + r."""
    p = case.N + r
    near, far = [], []
    for j in range(case.N):
        (near if p - j < D else far).append(j)
    return near, far


def window(case, rope, scale, W, *, block_causal=False) -> Read:
    """FOLD without its far memory: N_p only, D = W + B."""
    D = W + case.B

    def keys_for(r):
        near, _ = near_far(case, r, D)
        return [("c", j, case.N + r - j) for j in near] + _block_keys(case, r, block_causal)
    return _single_softmax(case, rope, scale, keys_for)


def shared_window(case, rope, scale, W, *, block_causal=False) -> Read:
    """NOT the paper's Window: every block position reads the same last W entries."""
    def keys_for(r):
        lo = max(0, case.N - W)
        return [("c", j, case.N + r - j) for j in range(lo, case.N)] + _block_keys(case, r, block_causal)
    return _single_softmax(case, rope, scale, keys_for)


def renumbered(case, rope, scale, positions, *, block_causal=False) -> Read:
    """Keep `positions` (ascending), renumber them 0..M-1, block follows at M..M+B-1."""
    positions = list(positions)
    assert positions == sorted(set(positions))
    M = len(positions)

    def keys_for(r):
        ks = [("c", positions[i], M + r - i) for i in range(M)]
        return ks + _block_keys(case, r, block_causal)
    return _single_softmax(case, rope, scale, keys_for)


def streaming_positions(N, sinks=4, recent=2044):
    if N <= sinks + recent:  # noqa: SIM300
        return list(range(N))
    return list(range(sinks)) + list(range(N - recent, N))


def streamingllm(case, rope, scale, *, sinks=4, recent=2044, block_causal=False) -> Read:
    return renumbered(case, rope, scale, streaming_positions(case.N, sinks, recent),
                      block_causal=block_causal)


def yarn(case, yarn_rope, scale, *, block_causal=False) -> Read:
    """Full context at true distances under YaRN frequencies (pass a Rope from rope_yarn)."""
    return dflash(case, yarn_rope, scale, block_causal=block_causal)


def rerope_query_factor(p, train_len=4096):
    """p is the 0-indexed absolute position, so p + 1 counts the tokens up to and including it."""
    return max(1.0, math.log(p + 1) / math.log(train_len))


def rerope(case, rope, scale, W, *, train_len=4096, log_scale=True, far_distance=None,
           block_causal=False, native_window=None) -> Read:
    """True distance inside N_p, constant distance D for every older entry, one softmax.

    far_distance(r) overrides D (used by self-checks).  native_window: a sliding-window
    layer keeps its own window as the near part; older entries are still read at D.
    """
    D = W + case.B
    fd = far_distance or (lambda r: D)
    near_limit = D if native_window is None else native_window

    def keys_for(r):
        p = case.N + r
        ks = []
        for j in range(case.N):
            if p - j < near_limit:
                ks.append(("c", j, p - j))
            elif p - j >= D or native_window is not None:
                ks.append(("c", j, fd(r)))
        return ks + _block_keys(case, r, block_causal)

    mul = (lambda r: rerope_query_factor(case.N + r, train_len)) if log_scale else (lambda r: 1.0)
    return _single_softmax(case, rope, scale, keys_for, mul)


def fold(case, rope, scale, W, alpha, *, block_causal=False, native_window=None,
         far_min_distance=None) -> Read:
    """Equations 1-4.

    near : softmax over N_p at true distances            -> o_N, log Z_N
    far  : entries with p - j >= D, all at distance D + r -> logits s~
           o_F  = softmax(alpha * s~) v
           Z_F  = (sum exp(alpha s~))^(1/alpha)
    out  = (Z_N o_N + Z_F o_F) / (Z_N + Z_F)

    native_window: near part of a sliding-window layer (p - j < native_window).
    far_min_distance: where the far part starts; D unless given.
    """
    D = W + case.B
    near_limit = D if native_window is None else native_window
    far_limit = D if far_min_distance is None else far_min_distance
    res = Read([], [], [], {"o_near": [], "log_Z_near": [], "o_far": [], "log_Z_far": [], "far_logits": []})
    for r in range(case.B):
        p = case.N + r
        near = [("c", j, p - j) for j in range(case.N) if p - j < near_limit]
        near += _block_keys(case, r, block_causal)
        far = [("c", j, D + r) for j in range(case.N) if p - j >= far_limit]
        rows = {k: [] for k in ("out", "lse", *res.extra)}
        for h in range(case.Hq):
            e_near = [(logit(case.q[r][h], case.key(s, j, h), x, rope, scale), case.value(s, j, h))
                      for s, j, x in near]
            o_n, lz_n = softmax_read(e_near, case.d)
            raw = [(logit(case.q[r][h], case.key(s, j, h), x, rope, scale), case.value(s, j, h))
                   for s, j, x in far]
            o_f, lse_a = softmax_read([(alpha * x, v) for x, v in raw], case.d)
            lz_f = lse_a / alpha if raw else NEG_INF
            top = max(lz_n, lz_f)
            a, b = math.exp(lz_n - top), (math.exp(lz_f - top) if raw else 0.0)
            rows["out"].append([(a * o_n[c] + b * o_f[c]) / (a + b) for c in range(case.d)])
            rows["lse"].append(top + math.log(a + b))
            rows["o_near"].append(o_n)
            rows["log_Z_near"].append(lz_n)
            rows["o_far"].append(o_f)
            rows["log_Z_far"].append(lz_f)
            rows["far_logits"].append([x for x, _ in raw])
        res.out.append(rows.pop("out"))
        res.lse.append(rows.pop("lse"))
        res.keys.append(near + far)
        for k, v in rows.items():
            res.extra[k].append(v)
    return res


# --------------------------------------------------------------------------- InfLLM


@dataclass
class InfLayout:
    init: range       # initial entries
    blocks: list      # [(start, end)]
    tail: range       # entries older than the blocks' end, not (yet) grouped


def infllm_layout(N, D, *, n_init=128, block=128, exited=None) -> InfLayout:
    """Which context entries are initial / grouped / ungrouped.

    exited counts entries that have left the window for good; default N - D, so that a
    grouped entry is outside N_p for every r >= 0.
    """
    ex = max(0, N - D) if exited is None else exited
    init = range(0, min(n_init, ex))
    blocks = []
    if ex >= n_init:
        start = n_init
        while ex - start >= block:
            blocks.append((start, start + block))
            start += block
        tail = range(start, N)
    else:
        tail = range(ex, N)
    return InfLayout(init, blocks, tail)


def infllm_repr(case, layout, received=None, top=4):
    """[nblocks][Hq][d]: mean key of the `top` entries with the most received attention.

    received: [N][Hq] accumulated attention weights, or None.  A block none of whose
    entries ever received attention uses the mean of all its keys.
    """
    out = []
    for start, end in layout.blocks:
        heads = []
        for h in range(case.Hq):
            idx = list(range(start, end))
            if received is not None and any(received[j][h] > 0.0 for j in idx):
                idx = sorted(idx, key=lambda j: (-received[j][h], j))[:top]
            heads.append([math.fsum(case.key("c", j, h)[c] for j in idx) / len(idx)
                          for c in range(case.d)])
        out.append(heads)
    return out


def infllm_select(case, rope, repr_, D, *, topk=16, rotate_query=True):
    """Block scores: sum over heads of <mean_r query, representation>; the query is rotated
    to D - 1 (as it is when it reads the blocks).  All heads share one selection."""
    scores = []
    for b in range(len(repr_)):
        terms = []
        for h in range(case.Hq):
            rows = [rotate(case.q[r][h], D - 1, rope) if rotate_query else case.q[r][h]
                    for r in range(case.B)]
            for c in range(case.d):
                terms.append(math.fsum(row[c] for row in rows) / case.B * repr_[b][h][c])
        scores.append(math.fsum(terms))
    order = sorted(range(len(scores)), key=lambda b: (-scores[b], b))
    return sorted(order[:topk]), scores


def infllm(case, rope, scale, W, *, layout, selected, block_causal=False) -> Read:
    """Window at true distances; initial entries, selected blocks and the ungrouped tail all
    at distance D - 1 for every block position; one softmax."""
    D = W + case.B

    def keys_for(r):
        p = case.N + r
        far = list(layout.init)
        for b in selected:
            far += list(range(*layout.blocks[b]))
        far += [j for j in layout.tail if p - j >= D]
        assert all(p - j >= D for j in far), "a far entry is still inside the window"
        near = [j for j in range(case.N) if p - j < D]
        return ([("c", j, D - 1) for j in far] + [("c", j, p - j) for j in near]
                + _block_keys(case, r, block_causal))
    return _single_softmax(case, rope, scale, keys_for)


def received_attention(case, rope, scale, read: Read):
    """[N][Hq]: attention weight each context entry received in `read`, summed over block
    positions, counting only reads at the entry's true distance (inside the window)."""
    got = [[0.0] * case.Hq for _ in range(case.N)]
    for r in range(case.B):
        for src, j, dist in read.keys[r]:
            if src == "c" and dist == case.N + r - j:
                for h in range(case.Hq):
                    x = logit(case.q[r][h], case.key("c", j, h), dist, rope, scale)
                    got[j][h] += math.exp(x - read.lse[r][h])
    return got


# --------------------------------------------------------------------------- CMR


def cmr_scores(attn, chunk=32):
    """Mean attention weight of each consecutive chunk; attn is [N], already head-averaged.
    A short last chunk is averaged over its own length."""
    out = []
    for start in range(0, len(attn), chunk):
        part = attn[start:start + chunk]
        out.append(math.fsum(part) / len(part))
    return out


def cmr_top_chunks(attn, *, chunk=32, topk=64):
    s = cmr_scores(_lists(attn), chunk)
    return sorted(sorted(range(len(s)), key=lambda c: (-s[c], c))[:topk])


class CMRSelection:
    """Which entries the drafter reads, round by round.

    start(N)            first draft after prefill: the topk most recent chunks
    advance(N, attn)    entries were committed (N is the new context length).  On a refresh
                        round pass attn, the head-averaged target weights over the N entries;
                        otherwise attn=None.  A chunk started by these entries is added; a
                        chunk already selected grows with them.
    Rounds are numbered from 0; with refresh=8 the refresh rounds are 1, 9, 17, ...
    """

    def __init__(self, chunk=32, topk=64, refresh=8):
        self.chunk, self.topk, self.refresh = chunk, topk, refresh

    def start(self, N):
        self.N, self.round = N, 0
        n = -(-N // self.chunk)
        self.chunks = set(range(max(0, n - self.topk), n))
        return self.positions()

    def wants_attention(self):
        """True when the next advance() is a refresh."""
        return self.round % self.refresh == 0

    def advance(self, N, attn=None):
        assert N >= self.N and (attn is not None) == self.wants_attention()
        before, after = -(-self.N // self.chunk), -(-N // self.chunk)
        self.N, self.round = N, self.round + 1
        if attn is not None:
            assert len(attn) == N
            self.chunks = set(cmr_top_chunks(attn, chunk=self.chunk, topk=self.topk))
        self.chunks |= set(range(before, after))
        return self.positions()

    def positions(self):
        out = []
        for c in sorted(self.chunks):
            out += range(c * self.chunk, min((c + 1) * self.chunk, self.N))
        return out


def cmr(case, rope, scale, positions, *, block_causal=False) -> Read:
    return renumbered(case, rope, scale, positions, block_causal=block_causal)
