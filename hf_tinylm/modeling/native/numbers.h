/* bfloat16 and exponentials in vectors of 16 and 32 numbers (AVX-512). */

#pragma once

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

typedef uint16_t bf16;
static const float LOG2_E = 1.44269504f;

static inline __m512 exp2_of(__m512 x) { /* within 2e-7 relative; polynomial of Cephes exp2f */
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x); /* in this order a NaN stays one */
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.535336188319500e-4f);
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.339887440266574e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.618437357674640e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.550332471162809e-2f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.402264791363012e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.931472028550421e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

static inline __m512i rounded(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

static inline __m512 widened(const bf16 *from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
}
