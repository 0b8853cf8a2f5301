/* Cross-entropies of rows of bfloat16 logits, each row read into the cache once. */

#include "numbers.h"

static inline __m512 masked(const bf16 *from, __mmask16 here, float elsewhere) {
    __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(here, from)), 16);
    return _mm512_mask_mov_ps(_mm512_set1_ps(elsewhere), here, (__m512)wide);
}

static inline float alone(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}

/* exp(x - from), the difference first: exact for large logits. */
static inline __m512 exp_from(__m512 x, __m512 from) {
    return exp2_of(_mm512_mul_ps(_mm512_sub_ps(x, from), _mm512_set1_ps(LOG2_E)));
}

/* Lanes of 16 classes from `first` on. */
static inline __mmask16 lanes(int64_t first, int64_t classes) {
    return classes - first >= 16 ? 0xFFFF : (__mmask16)((1u << (classes - first)) - 1);
}

static float row_loss(bf16 *logits, int64_t classes, int64_t target) {
    const float wanted = alone(logits[target]);
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int64_t k = 0; k < classes; k += 16)
        most = _mm512_max_ps(most, masked(logits + k, lanes(k, classes), -INFINITY));
    const float highest = _mm512_reduce_max_ps(most);
    const __m512 shift = _mm512_set1_ps(highest);
    __m512 sum = _mm512_setzero_ps(), other = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 32 <= classes; k += 32) {
        sum = _mm512_add_ps(sum, exp_from(widened(logits + k), shift));
        other = _mm512_add_ps(other, exp_from(widened(logits + k + 16), shift));
    }
    for (; k < classes; k += 16) {
        const __mmask16 here = lanes(k, classes);
        const __m512 x = exp_from(masked(logits + k, here, 0.0f), shift);
        sum = _mm512_add_ps(sum, _mm512_maskz_mov_ps(here, x));
    }
    const float total = _mm512_reduce_add_ps(_mm512_add_ps(sum, other));
    const __m512 share = _mm512_set1_ps(1.0f / total);
    for (k = 0; k + 32 <= classes; k += 32) {
        const __m512 low = _mm512_mul_ps(share, exp_from(widened(logits + k), shift));
        const __m512 high = _mm512_mul_ps(share, exp_from(widened(logits + k + 16), shift));
        _mm512_storeu_si512(logits + k, rounded(low, high));
    }
    for (; k < classes; k += 16) {
        const __mmask16 here = lanes(k, classes);
        const __m512 x = _mm512_mul_ps(share, exp_from(masked(logits + k, here, 0.0f), shift));
        _mm256_mask_storeu_epi16(logits + k, here, (__m256i)_mm512_cvtneps_pbh(x));
    }
    const __m512 own = _mm512_set1_ps(expf(wanted - highest) / total - 1.0f);
    logits[target] = (bf16)_mm_extract_epi16(_mm256_castsi256_si128((__m256i)_mm512_cvtneps_pbh(own)), 0);
    return (highest - wanted) + logf(total);
}

/* logits (rows, classes), `stride` numbers apart, become the gradients of the sum of the losses (rows,).
   Returns the number of targets that are no class; nothing is done then. */
int64_t loss_of_rows(bf16 *logits, int64_t stride, const int64_t *targets, int64_t rows, int64_t classes, int threads,
                     float *losses) {
    int64_t strange = 0;
    for (int64_t i = 0; i < rows; i++) strange += targets[i] < 0 || targets[i] >= classes;
    if (strange) return strange;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < rows; i++) losses[i] = row_loss(logits + i * stride, classes, targets[i]);
    return 0;
}
