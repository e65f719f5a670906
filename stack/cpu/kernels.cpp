// What a training step on a CPU does between its matmuls, in place, on what is still in the cache: the softmax of
// attention, forward and backward, and the loss.  kernels.py compiles and calls it.  The plain twins are
// F.scaled_dot_product_attention and model.chunk_arithmetic.
//
// A block of attention is the t last queries of `groups` query heads to S keys, for each of n key heads.  Query i sees
// keys 0..S-t+i and, where there is a mask, of those the ones it allows; `share` key heads have the same mask.
// Arithmetic is fp32; NaN and infinity come through, so that a broken step is seen.

#if defined(__AVX512F__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = uint16_t;  // the upper half of a float

static inline float number(float x) { return x; }

static inline float number(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline void store(float* to, float x) { *to = x; }

static inline void store(bf16* to, float x) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *to = bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp(x) for x <= 0 to 2e-7: 2^whole * 2^part, the second by its series.  Vectorises, unlike the library's.  Exactly 0
// where it is below 2^-80, which no sum of fp32 would notice: a subnormal product makes the matmul after it crawl.
static inline float exponential(float x) {
    float y = x * 1.44269504f;
    bool nothing = y < -80.0f;  // false for NaN, which stays NaN
    y = nothing ? -80.0f : y;
    float whole = nearbyintf(y), part = y - whole;
    float power = 1.0f + part * (0.693147181f + part * (0.240226507f + part * (0.0555041087f + part * (
        0.00961812911f + part * (0.00133335581f + part * 0.000154035304f)))));
    int32_t bits = (int32_t(whole) + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return nothing ? 0 : power * scale;
}

static inline float hyperbolic_tangent(float x) {
    float small = exponential(-2 * fabsf(x));
    return copysignf((1 - small) / (1 + small), x);
}

// scores (n, groups, t, S) become weights; lse (n * groups, length) gets the log-sum-exp of its last t rows before S.
template <typename T>
static void forward(T* scores, const uint8_t* mask, float* lse, long n, long groups, long t, long S, long length,
                    long share, float scale) {
#pragma omp parallel
    {
        std::vector<float> room(S);
        float* x = room.data();
#pragma omp for
        for (long row = 0; row < n * groups * t; row++) {
            T* score = scores + row * S;
            long i = row % t, head = row / t, seen = S - t + i + 1;
            float top = -INFINITY, total = 0;
#pragma omp simd reduction(max : top)
            for (long j = 0; j < seen; j++) {
                x[j] = number(score[j]) * scale;
                top = x[j] > top ? x[j] : top;
            }
            if (mask) {
                const uint8_t* allowed = mask + (head / groups / share * t + i) * S;
                top = -INFINITY;
#pragma omp simd reduction(max : top)
                for (long j = 0; j < seen; j++) {
                    x[j] = allowed[j] ? x[j] : -INFINITY;
                    top = x[j] > top ? x[j] : top;
                }
            }
#pragma omp simd reduction(+ : total)
            for (long j = 0; j < seen; j++) {
                x[j] = exponential(x[j] - top);
                total += x[j];
            }
            float each = 1 / total;
            for (long j = 0; j < seen; j++) store(score + j, x[j] * each);
            memset(score + seen, 0, (S - seen) * sizeof(T));
            lse[head * length + S - t + i] = top + logf(total);
        }
    }
}

// scores and the gradients of weights, both with keys first (n, S, groups, t), become weights and gradients of scores;
// delta as lse: the sum of gradient times output.
template <typename T>
static void backward(T* scores, T* grads, const uint8_t* mask, const float* lse, const float* delta, long n,
                     long groups, long t, long S, long length, long share, float scale) {
#pragma omp parallel for
    for (long row = 0; row < n * S * groups; row++) {  // one key, the queries of one head
        T *score = scores + row * t, *grad = grads + row * t;
        long key = row / groups % S, which = row / groups / S, head = which * groups + row % groups;
        long first = key > S - t ? key - (S - t) : 0;  // the query that is the key's own token
        const float *of_row = lse + head * length + S - t, *sum = delta + head * length + S - t;
#pragma omp simd
        for (long i = first; i < t; i++) {
            float weight = exponential(number(score[i]) * scale - of_row[i]);
            store(grad + i, weight * (number(grad[i]) - sum[i]) * scale);
            store(score + i, weight);
        }
        memset(score, 0, first * sizeof(T));
        memset(grad, 0, first * sizeof(T));
        if (mask) {
            const uint8_t* allowed = mask + (which / share * S + key) * t;
            for (long i = first; i < t; i++)
                if (!allowed[i]) score[i] = grad[i] = 0;
        }
    }
}

// The loss of each row of logits (n, V), which become its gradient times `factor` if `grad`: model.chunk_arithmetic.
template <typename T>
static void cross_entropy(T* logits, const int64_t* targets, const float* factor, float* loss, long n, long V,
                          long n_vocab, long ignore_index, float z_loss, float softcap, int grad) {
#pragma omp parallel
    {
        std::vector<float> room(n_vocab);
        float* x = room.data();
#pragma omp for
        for (long row = 0; row < n; row++) {
            T* logit = logits + row * V;
            float top = -INFINITY, total = 0;
            if (softcap)
#pragma omp simd
                for (long j = 0; j < n_vocab; j++) x[j] = softcap * hyperbolic_tangent(number(logit[j]) / softcap);
            else
#pragma omp simd
                for (long j = 0; j < n_vocab; j++) x[j] = number(logit[j]);
#pragma omp simd reduction(max : top)
            for (long j = 0; j < n_vocab; j++) top = x[j] > top ? x[j] : top;
            bool valid = targets[row] != ignore_index;
            long target = valid ? targets[row] : 0;
            float chosen = x[target] - top;
#pragma omp simd reduction(+ : total)
            for (long j = 0; j < n_vocab; j++) {
                x[j] = exponential(x[j] - top);
                total += x[j];
            }
            float rest = logf(total), lse = top + rest;
            loss[row] = valid ? rest - chosen + z_loss * lse * lse : 0;
            if (!grad) continue;
            float scale = valid ? factor[row] : 0, each = (1 + 2 * z_loss * lse) / total;
            x[target] -= 1 / each;
            if (softcap)
#pragma omp simd
                for (long j = 0; j < n_vocab; j++) {
                    float capped = hyperbolic_tangent(number(logit[j]) / softcap);
                    store(logit + j, x[j] * each * scale * (1 - capped * capped));
                }
            else
#pragma omp simd
                for (long j = 0; j < n_vocab; j++) store(logit + j, x[j] * each * scale);
            memset(logit + n_vocab, 0, (V - n_vocab) * sizeof(T));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// For kernels.py, fp32 or (half) bf16

extern "C" void softmax_forward(void* scores, const uint8_t* mask, float* lse, long n, long groups, long t, long S,
                                long length, long share, float scale, int half) {
    if (half) forward((bf16*)scores, mask, lse, n, groups, t, S, length, share, scale);
    else forward((float*)scores, mask, lse, n, groups, t, S, length, share, scale);
}

extern "C" void softmax_backward(void* scores, void* grads, const uint8_t* mask, const float* lse, const float* delta,
                                 long n, long groups, long t, long S, long length, long share, float scale, int half) {
    if (half) backward((bf16*)scores, (bf16*)grads, mask, lse, delta, n, groups, t, S, length, share, scale);
    else backward((float*)scores, (float*)grads, mask, lse, delta, n, groups, t, S, length, share, scale);
}

extern "C" void cross_entropy_rows(void* logits, const int64_t* targets, const float* factor, float* loss, long n,
                                   long V, long n_vocab, long ignore_index, float z_loss, float softcap, int grad,
                                   int half) {
    if (half) cross_entropy((bf16*)logits, targets, factor, loss, n, V, n_vocab, ignore_index, z_loss, softcap, grad);
    else cross_entropy((float*)logits, targets, factor, loss, n, V, n_vocab, ignore_index, z_loss, softcap, grad);
}
