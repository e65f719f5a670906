// One token of each text through the whole model, on a CPU: model.py's forward pass for T = 1, read by decode.py.
//
// At one token the arithmetic is small and the weights are all of the work: every one is read once, from memory.  So
// there is one parallel region per token, threads own rows of every matrix, and while a block of rows is multiplied the
// next one is being fetched.  Between matrices everything is fp32.
//
// Texts are lanes of a vector: activations lie as (groups, channels, N), N = 1 for a single text, else LANES of them
// side by side, so that norms, gates and sums need no shuffles and a weight, once read, serves all lanes.
// Letters as in model.py; r rows of a matrix, g groups of N texts.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <type_traits>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define AMX 1
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int ROWS = 32;  // of a block, what a thread computes at a time: twice the height of an AMX tile
#define APART __attribute__((noinline))  // compiled once, in half the time
typedef float V __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef uint16_t bf16;

struct Matrix { const char* w; const float *scale, *bias; int64_t rows, cols, kind; };  // kind: bytes per weight
struct Layer {
    Matrix q, k, v, o, gate, up, down;
    const float *norm1, *norm1_bias, *norm2, *norm2_bias, *q_norm, *k_norm;
    int64_t rotated;
};
struct Model {
    double eps, softcap, embed_scale;
    int64_t C, L, H, K, D, F, B, S, threads, layernorm, embed_kind, cache_kind;
    const char *embed, *pos_embed;
    char *keys, *values;               // (L, B, K, S, D)
    const float *cos, *sin;            // (S, D/2)
    const int64_t* first;              // (B,) position of each text's first token
    const float *norm, *norm_bias;
    const Layer* layers;
    Matrix head;
    float* workspace;
};

template <class T, class P> static T get(const P* p) { T x; memcpy(&x, p, sizeof x); return x; }
template <class T> static void put(void* p, T x) { memcpy(p, &x, sizeof x); }
static float wide(float x) { return x; }
static float wide(int8_t x) { return x; }
static float wide(bf16 x) { uint32_t bits = uint32_t(x) << 16; return get<float>(&bits); }
static V load(const float* p) { return get<V>(p); }
#ifdef __AVX512F__  // what follows, in one instruction
static V load(const bf16* p) { return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(get<__m256i>(p)), 16); }
static V load(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(get<__m128i>(p))); }
#elif defined(__AVX2__)
static V load(const bf16* p) { return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(get<__m128i>(p)), 16); }
static V load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
#else
typedef bf16 Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Quarters __attribute__((vector_size(LANES)));
static V load(const bf16* p) { return (V)(__builtin_convertvector(get<Halves>(p), U) << 16); }
static V load(const int8_t* p) { return __builtin_convertvector(__builtin_convertvector(get<Quarters>(p), I), V); }
#endif
template <class X> static X rounded(X bits) { return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; }  // to nearest even
static void narrow(float x, float* p) { *p = x; }
static void narrow(float x, bf16* p) { *p = rounded(get<uint32_t>(&x)); }
#ifdef __AVX512F__
static float total(V x) { return _mm512_reduce_add_ps(x); }
#else
static float total(V x) { float sum = 0; for (int i = 0; i < LANES; i++) sum += x[i]; return sum; }
#endif

static V exp(V x) {  // 2^n * e^r, |r| <= ln(2)/2
    x = x < -87.0f ? V{} - 87.0f : x > 88.0f ? V{} + 88.0f : x;
    V shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    V r = x - n * 0.693145752f - n * 1.42860677e-6f;
    V p = ((((r / 720 + 1 / 120.0f) * r + 1 / 24.0f) * r + 1 / 6.0f) * r + 0.5f) * r * r + r + 1;
    return (V)((I)p + ((I)shifted << 23));
}
static V sigmoid(V x) { return 1 / (1 + exp(-x)); }
static V tanh(V x) { return 2 * sigmoid(2 * x) - 1; }

static void fetch(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
}

// R rows times one vector.  Several sums at once: one alone waits for each addition to finish.
template <int R, class T> static void dots(const T* w, int64_t cols, const float* x, float* y, const char* next) {
    constexpr int LINE = 64 / sizeof(T), STEP = LINE < LANES ? LANES : LINE;
    V sums[R][2] = {};
    int64_t k = 0;
    for (; k + STEP <= cols; k += STEP)
        for (int r = 0; r < R; r++) {
            __builtin_prefetch(next + (r * cols + k) * sizeof(T), 0, 2);
            for (int j = 0; j < STEP; j += LANES)
                sums[r][j / LANES % 2] += load(w + r * cols + k + j) * load(x + k + j);
        }
    for (int r = 0; r < R; r++) y[r] = total(sums[r][0] + sums[r][1]);
    for (; k < cols; k++)
        for (int r = 0; r < R; r++) y[r] += wide(w[r * cols + k]) * x[k];
}

// R rows times LANES texts: x (cols, LANES) -> y (R, LANES).
template <int R> static void outer(const float* w, int64_t cols, const float* x, float* y) {
    V sums[R] = {};
    for (int64_t k = 0; k < cols; k++)
        for (int r = 0; r < R; r++) sums[r] += w[r * cols + k] * load(x + k * LANES);
    for (int r = 0; r < R; r++) put(y + r * LANES, sums[r]);
}

#ifdef AMX
static const bool amx = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ask the kernel for the tiles' registers
static void tiles(bool on) {
    struct { uint8_t palette = 1, start = 0, no[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } config;
    for (int i = 0; i < 5; i++) config.bytes[i] = 64, config.rows[i] = 16;
    on ? _tile_loadconfig(&config) : _tile_release();
}
// 8 bits are exact in bf16; n: a multiple of 32
static void unpack(const int8_t* w, int64_t n, bf16* to, const char* next) {
    for (int64_t i = 0; i < n; i += 32) {
        if (i % 64 == 0) fetch(next + i, 64);
        put(to + i, _mm512_cvtne2ps_pbh(load(w + i + 16), load(w + i)));
    }
}
// ROWS (or half of them) of bf16 times 16 texts: x (cols / 2, 16, 2) bf16 -> y (ROWS, 16).
static void tile_rows(const bf16* w, int64_t cols, bool half, const uint32_t* x, float* y, const char* next,
                      int64_t bytes) {
    _tile_zero(0); _tile_zero(1);
    for (int64_t k = 0; k < cols; k += 32, next += bytes) {
        fetch(next, bytes);
        _tile_loadd(2, x + k * 8, 64); _tile_loadd(3, w + k, cols * 2);
        _tile_dpbf16ps(0, 3, 2);
        if (half) continue;
        _tile_loadd(4, w + 16 * cols + k, cols * 2);
        _tile_dpbf16ps(1, 4, 2);
    }
    _tile_stored(0, y, 64);
    if (!half) _tile_stored(1, y + 256, 64);
}
#else
constexpr bool amx = false;
static void tiles(bool) {}
static void unpack(const int8_t*, int64_t, bf16*, const char*) {}
static void tile_rows(const bf16*, int64_t, bool, const uint32_t*, float*, const char*, int64_t) {}
#endif

struct Range { int64_t begin, end; };
static Range share(int64_t n, int64_t unit, int t, int threads) {
    int64_t units = (n + unit - 1) / unit, end = units * (t + 1) / threads * unit;
    return {units * t / threads * unit, end < n ? end : n};
}

// What one thread works with.  N: texts in a group.
template <int N> struct Worker {
    const Model& m;
    int t, threads;
    int64_t groups, widest, S;
    float *x, *qkv, *mixed, *inner;        // shared: (groups, channels, N)
    float *h, *weights, *scores, *block;   // its own
    uint32_t* packed;
    float* end;

    Worker(const Model& m, int t, int threads) : m(m), t(t), threads(threads) {
        groups = (m.B + N - 1) / N, S = (m.S + LANES - 1) / LANES * LANES;
        float* p = m.workspace;
        auto take = [&](int64_t n) { float* start = p; p += (n + 15) / 16 * 16; return start; };
        widest = m.C > m.H * m.D ? m.C : m.H * m.D;
        widest = widest > m.F ? widest : m.F;
        x = take(groups * m.C * N), qkv = take(groups * (m.H + 2 * m.K) * m.D * N);
        mixed = take(groups * m.H * m.D * N), inner = take(groups * m.F * N);
        for (int i = 0; i <= t; i++) {
            h = take(groups * m.C * N), packed = (uint32_t*)take(N > 1 ? groups * (widest + 1) / 2 * N : 0);
            weights = take(N > 1 ? ROWS * widest : 0), block = take(2 * groups * ROWS * N);
            scores = take(4 * (m.D + S));
        }
        end = p;
    }

    bool tiled(const Matrix& a) {  // they round activations to bf16, as model.py does in bf16 and not in fp32
        return amx && N == 16 && a.kind < 4 && m.embed_kind == 2 && a.cols % 32 == 0;
    }
    Range mine(const Matrix& a) { return share(a.rows, ROWS / 2, t, threads); }
    const char* start(const Matrix& a) { return a.w + mine(a).begin * a.cols * a.kind; }  // of its rows

    // rows r..r+n of matrix a times in (groups, cols, N) -> y (groups, ROWS, N); meanwhile fetch what comes next
    template <class T> APART void rows(const Matrix& a, int64_t r, int n, const float* in, float* y, const char* next) {
        const T* w = (const T*)a.w + r * a.cols;
        if constexpr (N == 1) {
            int i = 0;
            for (; i + 4 <= n; i += 4) dots<4>(w + i * a.cols, a.cols, in, y + i, next + i * a.cols * sizeof(T));
            for (; i < n; i++) dots<1>(w + i * a.cols, a.cols, in, y + i, next + i * a.cols * sizeof(T));
        } else {
            if (tiled(a) && n % 16 == 0) {
                const bf16* tile = (const bf16*)w;
                if constexpr (sizeof(T) == 1) unpack(w, n * a.cols, (bf16*)weights, next), tile = (const bf16*)weights;
                for (int64_t g = 0; g < groups; g++)
                    tile_rows(tile, a.cols, n < ROWS, packed + g * a.cols / 2 * N, y + g * ROWS * N, next,
                              g || sizeof(T) == 1 ? 0 : n * 64);
            } else {
                const float* plain = sizeof(T) == 4 ? (const float*)w : weights;
                for (int64_t i = 0; i < (sizeof(T) == 4 ? 0 : n * a.cols); i++) weights[i] = wide(w[i]);
                for (int64_t g = 0; g < groups; g++) {
                    int i = 0;
                    float *to = y + g * ROWS * N;
                    const float* from = in + g * a.cols * N;
                    for (; i + 8 <= n; i += 8) outer<8>(plain + i * a.cols, a.cols, from, to + i * N);
                    for (; i < n; i++) outer<1>(plain + i * a.cols, a.cols, from, to + i * N);
                }
            }
        }
        for (int i = 0; i < n; i++) {
            float scale = a.scale ? a.scale[r + i] : 1, bias = a.bias ? a.bias[r + i] : 0;
            if (a.scale || a.bias)
                for (int64_t g = 0; g < groups; g++)
                    for (int j = 0; j < N; j++) { float& v = y[(g * ROWS + i) * N + j]; v = v * scale + bias; }
        }
    }
    APART void rows(const Matrix& a, int64_t r, int n, const float* in, float* y, const char* next) {
        a.kind == 4 ? rows<float>(a, r, n, in, y, next) : a.kind == 2 ? rows<bf16>(a, r, n, in, y, next)
                    : rows<int8_t>(a, r, n, in, y, next);
    }
    // this thread's rows of a, block by block: use(r, n, y (groups, ROWS, N)); after: what it will read next
    template <class Use> void multiply(const Matrix& a, const float* in, const char* after, Use use) {
        for (auto [r, end] = mine(a); r < end; r += ROWS) {
            int n = r + ROWS < end ? ROWS : end - r;
            rows(a, r, n, in, block, r + n < end ? a.w + (r + n) * a.cols * a.kind : after);
            use(r, n, block);
        }
    }
    // for tiles: pairs of channels as bf16 side by side
    APART void pack(const Matrix& a, const float* in) {
        if constexpr (N > 1)
            if (tiled(a))
                for (int64_t i = 0; i < groups * a.cols / 2; i++) {
                    U low = (U)load(in + 2 * i * N), high = (U)load(in + (2 * i + 1) * N);
                    put(packed + i * N, rounded(low) | (rounded(high) << 16));
                }
    }
    // arithmetic on one channel of all texts of a group
    using Lane = std::conditional_t<N == 1, float, V>;
    static Lane at(const float* p, int64_t c) { return get<Lane>(p + c * N); }
    template <class F> static Lane sum(int64_t n, F f) {
        Lane s{};
        if constexpr (N == 1) {
            #pragma omp simd reduction(+ : s)
            for (int64_t c = 0; c < n; c++) s += f(c);
        } else {
            for (int64_t c = 0; c < n; c++) s += f(c);
        }
        return s;
    }
    // the norm of x into h; every thread does all of it, which is cheaper than waiting for others
    APART void norm(const float* gain, const float* bias) {
        for (int64_t g = 0; g < groups; g++) {
            const float* in = x + g * m.C * N;
            float* out = h + g * m.C * N;
            Lane mean{};
            if (m.layernorm) mean = sum(m.C, [&](int64_t c) { return at(in, c); }) / float(m.C);
            Lane scale = sum(m.C, [&](int64_t c) { Lane d = at(in, c) - mean; return d * d; });
            scale = scale / float(m.C) + float(m.eps);
            for (int j = 0; j < N; j++) ((float*)&scale)[j] = 1 / std::sqrt(((float*)&scale)[j]);
            #pragma omp simd
            for (int64_t c = 0; c < m.C; c++)
                put(out + c * N, (at(in, c) - mean) * scale * gain[c] + (bias ? bias[c] : 0.0f));
        }
    }
    APART void embed(const int64_t* ids, int64_t length) {
        auto value = [&](const char* table, int64_t i) {
            return m.embed_kind == 4 ? ((const float*)table)[i] : wide(((const bf16*)table)[i]);
        };
        for (auto [b, end] = share(groups * N, 1, t, threads); b < end; b++)
            for (int64_t c = 0; c < m.C; c++) {
                float v = b < m.B ? value(m.embed, ids[b] * m.C + c) * float(m.embed_scale) : 0;
                if (b < m.B && m.pos_embed) v += value(m.pos_embed, (length - m.first[b]) * m.C + c);
                x[(b / N * m.C + c) * N + b % N] = v;
            }
    }
    // one head's vector out of qkv, normed and rotated
    APART void head(int64_t b, int64_t row, const float* gain, bool rotated, int64_t length, float* out) {
        const float* in = qkv + (b / N * (m.H + 2 * m.K) * m.D + row) * N + b % N;
        float square = 0;
        for (int64_t d = 0; d < m.D; d++) out[d] = in[d * N], square += out[d] * out[d];
        const float scale = 1 / std::sqrt(square / m.D + float(m.eps));
        if (gain)
            for (int64_t d = 0; d < m.D; d++) out[d] *= gain[d] * scale;
        const float *cos = m.cos + length * (m.D / 2), *sin = m.sin + length * (m.D / 2);
        if (rotated)
            for (int64_t d = 0; d < m.D / 2; d++) {
                float a = out[d], c = out[d + m.D / 2];
                out[d] = a * cos[d] - c * sin[d], out[d + m.D / 2] = c * cos[d] + a * sin[d];
            }
    }
    // R heads from h on, all of key head k: q (R, D), keys and values (n, D), p (R, S) for their weights
    template <int R, class T> APART void some(int64_t b, int64_t h, int64_t n, const T* keys, const T* values) {
        const int64_t D = m.D;
        float *q = scores, *p = q + R * D, sums[R];
        for (int64_t s = 0; s < n; s++) {
            V dots[R] = {};
            int64_t d = 0;
            fetch(values + s * D, D * sizeof(T));
            for (; d + LANES <= D; d += LANES)
                for (int r = 0; r < R; r++) dots[r] += load(q + r * D + d) * load(keys + s * D + d);
            for (int r = 0; r < R; r++) p[r * S + s] = total(dots[r]);
            for (; d < D; d++)
                for (int r = 0; r < R; r++) p[r * S + s] += q[r * D + d] * wide(keys[s * D + d]);
        }
        for (int r = 0; r < R; r++, p += S) {
            for (int64_t s = n; s % LANES; s++) p[s] = -INFINITY;
            V best = load(p), sum{};
            for (int64_t s = 0; s < n; s += LANES) best = load(p + s) > best ? load(p + s) : best;
            float top = best[0];
            for (int i = 1; i < LANES; i++) top = best[i] > top ? best[i] : top;
            for (int64_t s = 0; s < n; s += LANES) { V e = exp(load(p + s) - top); put(p + s, e); sum += e; }
            sums[r] = 1 / total(sum);
        }
        p -= R * S;
        auto out = [&](int r, int64_t d) -> float& { return mixed[((b / N * m.H + h + r) * D + d) * N + b % N]; };
        auto average = [&]<int J>(std::integral_constant<int, J>, int64_t d) {
            V y[R][J] = {};
            for (int64_t s = 0; s < n; s++) {
                if (d == 0) fetch(keys + (m.K * m.S + s) * D, D * sizeof(T));  // of the next text
                for (int j = 0; j < J; j++)
                    for (int r = 0; r < R; r++) y[r][j] += p[r * S + s] * load(values + s * D + d + j * LANES);
            }
            for (int i = 0; i < R * J * LANES; i++)
                out(i / (J * LANES), d + i % (J * LANES)) = ((float*)y)[i] * sums[i / (J * LANES)];
        };
        int64_t d = 0;
        for (; d + 4 * LANES <= D; d += 4 * LANES) average(std::integral_constant<int, 4>(), d);
        for (; d + LANES <= D; d += LANES) average(std::integral_constant<int, 1>(), d);
        for (; d < D; d++)
            for (int r = 0; r < R; r++) {
                float y = 0;
                for (int64_t s = 0; s < n; s++) y += p[r * S + s] * wide(values[s * D + d]);
                out(r, d) = y * sums[r];
            }
    }
    // all heads of text b that share key head k, four at a time; the new key and value go into the cache
    template <class T> APART void attend(int64_t l, int64_t b, int64_t k, int64_t length) {
        const Layer& a = m.layers[l];
        const float scale = 1 / std::sqrt(float(m.D));
        const int64_t D = m.D, first = m.first[b], n = length + 1 - first;
        const int64_t place = ((l * m.B + b) * m.K + k) * m.S + first;
        T *keys = (T*)m.keys + place * D, *values = (T*)m.values + place * D;
        head(b, (m.H + k) * D, a.k_norm, a.rotated, length, scores);
        for (int64_t d = 0; d < D; d++) narrow(scores[d], keys + (n - 1) * D + d);
        head(b, (m.H + m.K + k) * D, nullptr, false, length, scores);
        for (int64_t d = 0; d < D; d++) narrow(scores[d], values + (n - 1) * D + d);
        for (int64_t group = m.H / m.K, h = k * group, end = h + group; h < end;) {
            int some_heads = end - h < 4 ? 1 : 4;
            for (int r = 0; r < some_heads; r++) {
                float* q = scores + r * D;
                head(b, (h + r) * D, a.q_norm, a.rotated, length, q);
                for (int64_t d = 0; d < D; d++) q[d] *= scale;
            }
            some_heads == 4 ? some<4>(b, h, n, keys, values) : some<1>(b, h, n, keys, values);
            h += some_heads;
        }
    }
    void attention(int64_t l, int64_t length) {
        for (auto [i, end] = share(m.K * m.B, 1, t, threads); i < end; i++)  // by key head: its channels are near
            m.cache_kind == 4 ? attend<float>(l, i % m.B, i / m.B, length) : attend<bf16>(l, i % m.B, i / m.B, length);
    }
    void step(const int64_t* ids, float* logits, int64_t length) {
        auto store = [&](float* to, int64_t channels, int64_t r, int n, const float* y) {
            for (int64_t g = 0; g < groups; g++)
                memcpy(to + (g * channels + r) * N, y + g * ROWS * N, n * N * sizeof(float));
        };
        auto add = [&](int64_t r, int n, const float* y) {
            for (int64_t g = 0; g < groups; g++)
                for (int i = 0; i < n * N; i++) x[(g * m.C + r) * N + i] += y[g * ROWS * N + i];
        };
        embed(ids, length);
        #pragma omp barrier
        for (int64_t l = 0; l < m.L; l++) {
            const Layer& a = m.layers[l];
            const char* later = l + 1 < m.L ? start(m.layers[l + 1].q) : start(m.head);
            norm(a.norm1, a.norm1_bias);
            pack(a.q, h);
            int64_t row = 0;
            auto to_qkv = [&](int64_t r, int n, const float* y) { store(qkv, (m.H + 2 * m.K) * m.D, row + r, n, y); };
            multiply(a.q, h, start(a.k), to_qkv), row += a.q.rows;
            multiply(a.k, h, start(a.v), to_qkv), row += a.k.rows;
            multiply(a.v, h, start(a.o), to_qkv);
            #pragma omp barrier
            attention(l, length);
            #pragma omp barrier
            pack(a.o, mixed);
            multiply(a.o, mixed, start(a.up), add);
            #pragma omp barrier
            norm(a.norm2, a.norm2_bias);
            pack(a.up, h);
            multiply(a.up, h, start(a.down), [&](int64_t r, int n, float* y) {
                float* gate = y + groups * ROWS * N;
                if (a.gate.w) rows(a.gate, r, n, h, gate, a.gate.w + (r + n) * a.gate.cols * a.gate.kind);
                for (int64_t i = 0; i < groups * ROWS * N; i += LANES) {
                    V v = load(y + i), z = load(gate + i);
                    put(y + i, a.gate.w ? v * z * sigmoid(z) : v * sigmoid(1.59576912f * (v + 0.044715f * v * v * v)));
                }
                store(inner, m.F, r, n, y);
            });
            #pragma omp barrier
            pack(a.down, inner);
            multiply(a.down, inner, later, add);
            #pragma omp barrier
        }
        norm(m.norm, m.norm_bias);
        pack(m.head, h);
        multiply(m.head, h, start(m.head), [&](int64_t r, int n, float* y) {
            if (m.softcap)
                for (int64_t i = 0; i < groups * ROWS * N; i += LANES)
                    put(y + i, float(m.softcap) * tanh(load(y + i) / float(m.softcap)));
            for (int64_t b = 0; b < m.B; b++)
                for (int i = 0; i < n; i++) logits[b * m.head.rows + r + i] = y[(b / N * ROWS + i) * N + b % N];
        });
    }
};

template <int N> static int64_t run(const Model& m, const int64_t* ids, float* logits, int64_t length) {
    if (!m.workspace) return Worker<N>(m, m.threads - 1, m.threads).end - m.workspace;
    #pragma omp parallel num_threads(m.threads)
    {
        Worker<N> worker(m, omp_get_thread_num(), omp_get_num_threads());
        if (N > 1 && amx) tiles(true);
        worker.step(ids, logits, length);
        if (N > 1 && amx) tiles(false);
    }
    return 0;
}

// ids (B,) -> logits (B, vocab_size); `length` tokens are in the cache.  Without a workspace: how many floats it needs.
extern "C" int64_t step(const Model* m, const int64_t* ids, float* logits, int64_t length) {
    return m->B == 1 ? run<1>(*m, ids, logits, length) : run<LANES>(*m, ids, logits, length);
}

// Move weights to huge pages, which are read a tenth faster; where the system does not, they stay where they are.
extern "C" void huge_pages(uintptr_t start, uintptr_t bytes) {
#ifdef __linux__
    const uintptr_t page = 1 << 21, first = start / page * page;
    madvise((void*)first, (start + bytes - first + page - 1) / page * page, 25);  // MADV_COLLAPSE, Linux 6.1
#endif
}
