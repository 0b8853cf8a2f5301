/* Causal attention over whole windows and its gradients, in bfloat16 on the matrix tiles (AMX) of a processor.

   A row of scores is held in float32 and never in memory as a whole: forward, 32 queries with all their keys; backward,
   32 keys with 32 queries. Products round their factors to bfloat16 and sum in float32. Each pair of a window and a
   key/value head is one task of one thread, so results do not depend on the number of threads.

   T positions, rounded up to P, a multiple of 32; D channels of a head, a multiple of 32. Operands of a tile product:
     rows   16 rows of 32 numbers (A)
     turned 16 rows of a matrix as the columns of B: dwords (two neighbouring channels) transposed
     paired 32 rows of a matrix as the rows of B: neighbouring rows interleaved
   Source of the backward pass in blocks: FlashAttention-2, arXiv 2307.08691. */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "numbers.h"

typedef struct { int64_t window, head, position; } Strides; /* in numbers; channels are neighbours */
typedef struct { int64_t windows, heads, kv_heads, positions, channels; } Sizes;
typedef struct { const bf16 *at; size_t stride; } Rows; /* stride in bytes */

enum { TILE = 1024, SIDE = 16, BLOCK = 32 };

/* The system lets a process use tiles once it asks; 0 on success. */
int attention_prepare(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

static void configure_tiles(void) { /* eight tiles of 16 rows of 64 bytes */
    uint8_t config[64] __attribute__((aligned(64))) = {1};
    for (int i = 0; i < 8; i++) { config[16 + 2 * i] = 64; config[48 + i] = SIDE; }
    _tile_loadconfig(config);
}

static inline int64_t padded(int64_t n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }

/* ---- numbers ---- */

/* Lanes of 16 keys (or queries) from `first` on that are at most `last`. */
static inline __mmask16 up_to(int64_t first, int64_t last) {
    int64_t count = last - first + 1;
    return count >= SIDE ? 0xFFFF : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

static inline void transpose(__m512i r[SIDE]) { /* 16 x 16 dwords */
    __m512i t[SIDE];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

/* ---- operands ---- */

/* The positions of a head, as they lie where T is a multiple of 32, else copied to `room` with rows of zeros behind. */
static Rows rows_of(const bf16 *from, Strides s, int64_t window, int64_t head, int64_t T, int64_t D, bf16 *room) {
    from += window * s.window + head * s.head;
    if (T % BLOCK == 0) return (Rows){from, (size_t)s.position * sizeof(bf16)};
    for (int64_t t = 0; t < T; t++) memcpy(room + t * D, from + t * s.position, (size_t)D * sizeof(bf16));
    memset(room + T * D, 0, (size_t)((padded(T) - T) * D) * sizeof(bf16));
    return (Rows){room, (size_t)D * sizeof(bf16)};
}

static inline const uint8_t *row(Rows m, int64_t t) { return (const uint8_t *)m.at + (size_t)t * m.stride; }

/* Tiles [P/16][D/32]; with `channels`, also tiles [D/16][P/32] of 16 channels of 32 positions each. */
static void turned(Rows m, int64_t P, int64_t D, uint8_t *tiles, uint8_t *channels) {
    __m512i even, odd;
    { uint16_t e[32], o[32]; for (int i = 0; i < 32; i++) { e[i] = (uint16_t)(2 * i); o[i] = (uint16_t)(2 * i + 1); }
      even = _mm512_loadu_si512(e); odd = _mm512_loadu_si512(o); }
    int64_t steps = D / 32;
    for (int64_t block = 0; block < P / BLOCK; block++)
        for (int64_t step = 0; step < steps; step++) {
            __m512i half[2][SIDE];
            for (int side = 0; side < 2; side++) {
                int64_t tile = 2 * block + side;
                for (int i = 0; i < SIDE; i++) half[side][i] = _mm512_loadu_si512(row(m, tile * SIDE + i) + step * 64);
                transpose(half[side]);
                uint8_t *to = tiles + (tile * steps + step) * TILE;
                for (int i = 0; i < SIDE; i++) _mm512_store_si512(to + i * 64, half[side][i]);
            }
            for (int i = 0; channels && i < SIDE; i++) {
                uint8_t *to = channels + ((2 * step + i / 8) * (P / BLOCK) + block) * TILE + (2 * i % SIDE) * 64;
                _mm512_store_si512(to, _mm512_permutex2var_epi16(half[0][i], even, half[1][i]));
                _mm512_store_si512(to + 64, _mm512_permutex2var_epi16(half[0][i], odd, half[1][i]));
            }
        }
}

static inline __m512i interleave(int upper) { /* numbers 0 to 15 (or 16 to 31) of two rows, alternating */
    uint16_t index[32];
    for (int i = 0; i < 32; i++) index[i] = (uint16_t)(i / 2 + (i % 2 ? 32 : 0) + (upper ? 16 : 0));
    return _mm512_loadu_si512(index);
}

/* Tiles [P/32][D/16]. */
static void paired(Rows m, int64_t P, int64_t D, uint8_t *tiles) {
    const __m512i low = interleave(0), high = interleave(1);
    for (int64_t block = 0; block < P / BLOCK; block++)
        for (int64_t step = 0; step < D / 32; step++) {
            uint8_t *to = tiles + (block * (D / SIDE) + 2 * step) * TILE;
            for (int i = 0; i < SIDE; i++) {
                __m512i a = _mm512_loadu_si512(row(m, block * BLOCK + 2 * i) + step * 64);
                __m512i b = _mm512_loadu_si512(row(m, block * BLOCK + 2 * i + 1) + step * 64);
                _mm512_store_si512(to + i * 64, _mm512_permutex2var_epi16(a, low, b));
                _mm512_store_si512(to + TILE + i * 64, _mm512_permutex2var_epi16(a, high, b));
            }
        }
}

/* Tiles 0 to 3 += (A0, A1) x (B0, B1). */
static inline void multiply(const void *a0, const void *a1, size_t stride, const void *b0, const void *b1) {
    _tile_loadd(4, a0, stride);
    _tile_loadd(6, b0, 64);
    _tile_loadd(7, b1, 64);
    _tile_loadd(5, a1, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

static inline void clear(void) { _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); }

/* Tiles 0 to 3 as a block of 32 x 32 at `to`, whose rows are `stride` bytes apart. */
static inline void store(uint8_t *to, size_t stride) {
    _tile_stored(0, to, stride);
    _tile_stored(1, to + 64, stride);
    _tile_stored(2, to + SIDE * stride, stride);
    _tile_stored(3, to + SIDE * stride + 64, stride);
}

static inline void load(const uint8_t *from, size_t stride) {
    _tile_loadd(0, from, stride);
    _tile_loadd(1, from + 64, stride);
    _tile_loadd(2, from + SIDE * stride, stride);
    _tile_loadd(3, from + SIDE * stride + 64, stride);
}

/* 32 x 32 products of rows of `a` from `first` on with two turned tiles: scores of 32 rows and 32 columns. */
static inline void scores(Rows a, int64_t first, const uint8_t *tiles, int64_t steps, uint8_t *to, size_t stride) {
    clear();
    for (int64_t s = 0; s < steps; s++)
        multiply(row(a, first) + s * 64, row(a, first + SIDE) + s * 64, a.stride, tiles + s * TILE,
                 tiles + (steps + s) * TILE);
    store(to, stride);
}

/* Rows of float32, scaled, as `count` rows of bfloat16. */
static void write_rows(const uint8_t *from, size_t stride, const float *factors, int64_t step_of_factor, int64_t count,
                       int64_t D, bf16 *to, int64_t position) {
    for (int64_t i = 0; i < count; i++) {
        const float *line = (const float *)(from + (size_t)i * stride);
        __m512 factor = _mm512_set1_ps(factors[i * step_of_factor]);
        for (int64_t d = 0; d < D; d += 32) {
            __m512 low = _mm512_mul_ps(_mm512_loadu_ps(line + d), factor);
            __m512 high = _mm512_mul_ps(_mm512_loadu_ps(line + d + 16), factor);
            _mm512_storeu_si512(to + i * position + d, rounded(low, high));
        }
    }
}

/* ---- forward ---- */

/* 32 rows of scores, of which row i has `first + i + 1` keys, to probabilities that are not divided by their sums yet. */
static void soften(const uint8_t *from, size_t stride, int64_t first, float unit, uint8_t *to, size_t to_stride,
                   float *inverse, float *log_sum) {
    const __m512 factor = _mm512_set1_ps(unit);
    for (int64_t i = 0; i < BLOCK; i++) {
        const float *line = (const float *)(from + (size_t)i * stride);
        const __mmask16 near = up_to(first, first + i), far = up_to(first + SIDE, first + i);
        const __m512 none = _mm512_set1_ps(-INFINITY);
        __m512 a = _mm512_mask_loadu_ps(none, near, line + first);
        __m512 b = _mm512_mask_loadu_ps(none, far, line + first + SIDE);
        for (int64_t k = 0; k < first; k += BLOCK) {
            a = _mm512_max_ps(a, _mm512_loadu_ps(line + k));
            b = _mm512_max_ps(b, _mm512_loadu_ps(line + k + SIDE));
        }
        const float highest = unit * _mm512_reduce_max_ps(_mm512_max_ps(a, b));
        const __m512 shift = _mm512_set1_ps(highest);
        __m512 sum = _mm512_setzero_ps(), other = _mm512_setzero_ps();
        uint8_t *out = to + (size_t)i * to_stride;
        for (int64_t k = 0; k < first; k += BLOCK) {
            a = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(line + k), factor, shift));
            b = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(line + k + SIDE), factor, shift));
            sum = _mm512_add_ps(sum, a);
            other = _mm512_add_ps(other, b);
            _mm512_store_si512(out + 2 * k, rounded(a, b));
        }
        a = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(line + first), factor, shift));
        b = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(line + first + SIDE), factor, shift));
        a = _mm512_maskz_mov_ps(near, a);
        b = _mm512_maskz_mov_ps(far, b);
        _mm512_store_si512(out + 2 * first, rounded(a, b));
        const float total = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sum, a), _mm512_add_ps(other, b)));
        inverse[i] = 1.0f / total;
        log_sum[i] = highest + log2f(total);
    }
}

typedef struct { uint8_t *at; } Room;

static uint8_t *take(Room *room, int64_t bytes) {
    uint8_t *found = room->at;
    room->at += (bytes + 63) / 64 * 64;
    return found;
}

static int64_t forward_bytes(int64_t P, int64_t D) {
    return 5 * P * D * 2 + BLOCK * (P * 4 + 64) + BLOCK * (P * 2 + 64) + BLOCK * D * 4 + 64 * 16;
}

/* What a call reads and writes; `strides` of what it reads in this order: query, key, value, out, upstream. */
typedef struct {
    const bf16 *query, *key, *value, *out, *upstream;
    const Strides *strides;
    Sizes n;
    float scale;
    bf16 *written, *key_gradient, *value_gradient; /* written: the output, or the gradient of the query */
    float *log_sums;
} Call;

typedef void Task(const Call *call, int64_t window, int64_t kv, Room room);

/* Runs a task of each window and key/value head, with `bytes` of memory for each thread. 0, or 1 without memory. */
static int run(const Call *call, Task *task, int64_t bytes, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        uint8_t before[64] __attribute__((aligned(64)));
        _tile_storeconfig(before);
        configure_tiles();
        uint8_t *memory = aligned_alloc(64, (size_t)bytes / 64 * 64 + 64);
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < call->n.windows * call->n.kv_heads; i++)
            if (memory) task(call, i / call->n.kv_heads, i % call->n.kv_heads, (Room){memory});
        free(memory);
        _tile_loadconfig(before); /* whoever uses tiles on this thread next finds its own */
    }
    return failed;
}

static void attend(const Call *c, int64_t window, int64_t kv, Room room) {
    const int64_t T = c->n.positions, D = c->n.channels, P = padded(T), group = c->n.heads / c->n.kv_heads;
    const int64_t steps = D / 32, position = c->n.heads * D;
    const size_t score_stride = (size_t)P * 4 + 64, share_stride = (size_t)P * 2 + 64;
    bf16 *copies[3];
    for (int i = 0; i < 3; i++) copies[i] = (bf16 *)take(&room, P * D * 2);
    uint8_t *keys = take(&room, P * D * 2), *values = take(&room, P * D * 2);
    uint8_t *raw = take(&room, BLOCK * (int64_t)score_stride), *shares = take(&room, BLOCK * (int64_t)share_stride);
    uint8_t *sums = take(&room, BLOCK * D * 4);
    turned(rows_of(c->key, c->strides[1], window, kv, T, D, copies[1]), P, D, keys, NULL);
    paired(rows_of(c->value, c->strides[2], window, kv, T, D, copies[2]), P, D, values);
    for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
        Rows q = rows_of(c->query, c->strides[0], window, head, T, D, copies[0]);
        for (int64_t first = 0; first < P; first += BLOCK) {
            float inverse[BLOCK], log_sum[BLOCK];
            for (int64_t k = 0; k <= first; k += BLOCK)
                scores(q, first, keys + k / SIDE * steps * TILE, steps, raw + k * 4, score_stride);
            soften(raw, score_stride, first, c->scale * LOG2_E, shares, share_stride, inverse, log_sum);
            for (int64_t d = 0; d < D / SIDE; d += 2) {
                clear();
                for (int64_t k = 0; k <= first; k += BLOCK) {
                    const uint8_t *b = values + (k / BLOCK * (D / SIDE) + d) * TILE;
                    multiply(shares + 2 * k, shares + SIDE * share_stride + 2 * k, share_stride, b, b + TILE);
                }
                store(sums + d * 64, (size_t)D * 4);
            }
            const int64_t count = T - first < BLOCK ? T - first : BLOCK;
            write_rows(sums, (size_t)D * 4, inverse, 1, count, D,
                       c->written + (window * T + first) * position + head * D, position);
            memcpy(c->log_sums + (window * c->n.heads + head) * T + first, log_sum, (size_t)count * sizeof(float));
        }
    }
}

/* out (windows, T, heads, D) in memory; log_sums (windows, heads, T) in base 2. Returns 0, or 1 without memory. */
int attention_forward(const bf16 *query, const bf16 *key, const bf16 *value, const Strides strides[3], Sizes n,
                      float scale, int threads, bf16 *out, float *log_sums) {
    const Call call = {.query = query, .key = key, .value = value, .strides = strides, .n = n, .scale = scale,
                       .written = out, .log_sums = log_sums};
    return run(&call, attend, forward_bytes(padded(n.positions), n.channels), threads);
}

/* ---- backward ---- */

/* Scores of 32 keys (rows) and 32 queries to probabilities and gradients of scores, as operands of the products.
   With `diagonal`, keys after their query count nothing. */
static void score_gradients(const float *raw, const float *upstream, const float *log_sum, const float *mean, float unit,
                            int diagonal, uint8_t *shares, uint8_t *gradients, uint8_t *gradients_paired) {
    const __m512 factor = _mm512_set1_ps(unit);
    const __m512 log_low = _mm512_loadu_ps(log_sum), log_high = _mm512_loadu_ps(log_sum + SIDE);
    const __m512 mean_low = _mm512_loadu_ps(mean), mean_high = _mm512_loadu_ps(mean + SIDE);
    const __m512i low = interleave(0), high = interleave(1);
    __m512i last = _mm512_setzero_si512();
    for (int i = 0; i < BLOCK; i++) {
        __m512 a = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(raw + i * BLOCK), factor, log_low));
        __m512 b = exp2_of(_mm512_fmsub_ps(_mm512_load_ps(raw + i * BLOCK + SIDE), factor, log_high));
        if (diagonal) {
            a = _mm512_maskz_mov_ps((__mmask16)~up_to(0, i - 1), a);
            b = _mm512_maskz_mov_ps((__mmask16)~up_to(SIDE, i - 1), b);
        }
        _mm512_store_si512(shares + i * 64, rounded(a, b));
        a = _mm512_mul_ps(a, _mm512_sub_ps(_mm512_load_ps(upstream + i * BLOCK), mean_low));
        b = _mm512_mul_ps(b, _mm512_sub_ps(_mm512_load_ps(upstream + i * BLOCK + SIDE), mean_high));
        const __m512i line = rounded(a, b);
        _mm512_store_si512(gradients + i * 64, line);
        if (i % 2) {
            _mm512_store_si512(gradients_paired + i / 2 * 64, _mm512_permutex2var_epi16(last, low, line));
            _mm512_store_si512(gradients_paired + TILE + i / 2 * 64, _mm512_permutex2var_epi16(last, high, line));
        }
        last = line;
    }
}

/* Of each query: the sum over channels of its output times that output's gradient. */
static void means_of(Rows output, Rows upstream, int64_t P, int64_t D, float *mean) {
    for (int64_t t = 0; t < P; t++) {
        const bf16 *a = (const bf16 *)row(output, t), *b = (const bf16 *)row(upstream, t);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t d = 0; d < D; d += SIDE) sum = _mm512_fmadd_ps(widened(a + d), widened(b + d), sum);
        mean[t] = _mm512_reduce_add_ps(sum);
    }
}

static int64_t backward_bytes(int64_t P, int64_t D) {
    int64_t blocks = P / BLOCK;
    return 5 * P * D * 2 + 5 * P * D * 2 + 2 * P * D * 4 + 2 * P * 4 + 2 * blocks * 2 * TILE +
           blocks * (blocks + 1) / 2 * 2 * TILE + 3 * 4096 + 64 * 32;
}

/* Of one query head and its keys and values (o: output, g: its gradient): t turned, p paired, kc keys by channels. */
typedef struct { Rows q, k, v, o, g; uint8_t *qt, *qp, *gt, *gp, *kc; float *log_sum, *mean; } Operands;

/* Adds a query head's part to the float32 sums of the gradients of keys and values, and keeps those of its scores. */
static void add_head(Operands m, int64_t P, int64_t D, float unit, int fresh, uint8_t *shares, uint8_t *gradients,
                     uint8_t *all_gradients, uint8_t *buffers, uint8_t *key_sums, uint8_t *value_sums) {
    const int64_t steps = D / 32, tiles = D / SIDE, blocks = P / BLOCK;
    const size_t stride = (size_t)D * 4;
    uint8_t *raw = buffers, *upstream = buffers + 4096;
    for (int64_t kb = 0; kb < blocks; kb++) {
        for (int64_t qb = kb; qb < blocks; qb++) {
            scores(m.k, kb * BLOCK, m.qt + 2 * qb * steps * TILE, steps, raw, BLOCK * 4);
            scores(m.v, kb * BLOCK, m.gt + 2 * qb * steps * TILE, steps, upstream, BLOCK * 4);
            score_gradients((float *)raw, (float *)upstream, m.log_sum + qb * BLOCK, m.mean + qb * BLOCK, unit, qb == kb,
                            shares + qb * 2 * TILE, gradients + qb * 2 * TILE,
                            all_gradients + (qb * (qb + 1) / 2 + kb) * 2 * TILE);
        }
        for (int64_t d = 0; d < tiles; d += 2) {
            uint8_t *sums[2] = {value_sums + kb * BLOCK * stride + d * 64, key_sums + kb * BLOCK * stride + d * 64};
            for (int which = 0; which < 2; which++) {
                const uint8_t *a = which ? gradients : shares, *b = (which ? m.qp : m.gp) + d * TILE;
                if (fresh) clear(); else load(sums[which], stride);
                for (int64_t qb = kb; qb < blocks; qb++)
                    multiply(a + qb * 2 * TILE, a + qb * 2 * TILE + TILE, 64, b + qb * tiles * TILE,
                             b + qb * tiles * TILE + TILE);
                store(sums[which], stride);
            }
        }
    }
}

/* Query gradients from the kept gradients of scores: products give them with channels as rows. */
static void write_query_gradients(const uint8_t *kc, const uint8_t *all_gradients, int64_t T, int64_t P, int64_t D,
                                  float scale, uint8_t *buffer, bf16 *to, int64_t position) {
    const int64_t blocks = P / BLOCK;
    const __m512 factor = _mm512_set1_ps(scale);
    for (int64_t qb = 0; qb < blocks; qb++)
        for (int64_t d = 0; d < D / SIDE; d += 2) {
            clear();
            const uint8_t *b = all_gradients + qb * (qb + 1) / 2 * 2 * TILE;
            for (int64_t kb = 0; kb <= qb; kb++)
                multiply(kc + (d * blocks + kb) * TILE, kc + ((d + 1) * blocks + kb) * TILE, 64, b + kb * 2 * TILE,
                         b + kb * 2 * TILE + TILE);
            _tile_stored(0, buffer, 64); /* channels d.. x queries 0..15 */
            _tile_stored(1, buffer + TILE, 64); /* channels d.. x queries 16..31 */
            _tile_stored(2, buffer + 2 * TILE, 64);
            _tile_stored(3, buffer + 3 * TILE, 64);
            for (int side = 0; side < 2; side++) {
                __m512i low[SIDE], high[SIDE];
                for (int i = 0; i < SIDE; i++) {
                    low[i] = _mm512_load_si512(buffer + side * TILE + i * 64);
                    high[i] = _mm512_load_si512(buffer + (2 + side) * TILE + i * 64);
                }
                transpose(low);
                transpose(high);
                for (int i = 0; i < SIDE; i++) {
                    const int64_t t = qb * BLOCK + side * SIDE + i;
                    if (t >= T) break;
                    _mm512_storeu_si512(to + t * position + d * SIDE, rounded(_mm512_mul_ps((__m512)low[i], factor),
                                                                             _mm512_mul_ps((__m512)high[i], factor)));
                }
            }
        }
}

static void differentiate(const Call *c, int64_t window, int64_t kv, Room room) {
    const int64_t T = c->n.positions, D = c->n.channels, P = padded(T), group = c->n.heads / c->n.kv_heads;
    const int64_t blocks = P / BLOCK;
    bf16 *copies[5];
    for (int i = 0; i < 5; i++) copies[i] = (bf16 *)take(&room, P * D * 2);
    Operands m;
    m.kc = take(&room, P * D * 2);
    m.qt = take(&room, P * D * 2); m.qp = take(&room, P * D * 2);
    m.gt = take(&room, P * D * 2); m.gp = take(&room, P * D * 2);
    m.log_sum = (float *)take(&room, P * 4); m.mean = (float *)take(&room, P * 4);
    uint8_t *key_sums = take(&room, P * D * 4), *value_sums = take(&room, P * D * 4);
    uint8_t *shares = take(&room, blocks * 2 * TILE), *gradients = take(&room, blocks * 2 * TILE);
    uint8_t *all_gradients = take(&room, blocks * (blocks + 1) / 2 * 2 * TILE);
    uint8_t *buffers = take(&room, 8192);
    m.k = rows_of(c->key, c->strides[1], window, kv, T, D, copies[1]);
    m.v = rows_of(c->value, c->strides[2], window, kv, T, D, copies[2]);
    turned(m.k, P, D, m.qt, m.kc); /* qt is written anew for each head */
    for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
        m.q = rows_of(c->query, c->strides[0], window, head, T, D, copies[0]);
        m.o = rows_of(c->out, c->strides[3], window, head, T, D, copies[3]);
        m.g = rows_of(c->upstream, c->strides[4], window, head, T, D, copies[4]);
        turned(m.q, P, D, m.qt, NULL);
        turned(m.g, P, D, m.gt, NULL);
        paired(m.q, P, D, m.qp);
        paired(m.g, P, D, m.gp);
        means_of(m.o, m.g, P, D, m.mean);
        memset(m.log_sum, 0, (size_t)P * 4);
        memcpy(m.log_sum, c->log_sums + (window * c->n.heads + head) * T, (size_t)T * 4);
        add_head(m, P, D, c->scale * LOG2_E, head == kv * group, shares, gradients, all_gradients, buffers, key_sums,
                 value_sums);
        write_query_gradients(m.kc, all_gradients, T, P, D, c->scale, buffers,
                              c->written + window * T * c->n.heads * D + head * D, c->n.heads * D);
    }
    const float one = 1.0f;
    const int64_t start = window * T * c->n.kv_heads * D + kv * D;
    write_rows(key_sums, (size_t)D * 4, &c->scale, 0, T, D, c->key_gradient + start, c->n.kv_heads * D);
    write_rows(value_sums, (size_t)D * 4, &one, 0, T, D, c->value_gradient + start, c->n.kv_heads * D);
}

/* Gradients in memory as (windows, T, heads, D). strides: query, key, value, out, upstream. 0, or 1 without memory. */
int attention_backward(const bf16 *query, const bf16 *key, const bf16 *value, const bf16 *out, const bf16 *upstream,
                       float *log_sums, const Strides strides[5], Sizes n, float scale, int threads,
                       bf16 *query_gradient, bf16 *key_gradient, bf16 *value_gradient) {
    const Call call = {query, key, value, out, upstream, strides, n, scale, query_gradient, key_gradient,
                       value_gradient, log_sums};
    return run(&call, differentiate, backward_bytes(padded(n.positions), n.channels), threads);
}
