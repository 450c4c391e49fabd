/* Products with quantised matrices on x86-64, the attention of single tokens, and their whole way through the layers of
 * a plain model.
 *
 * Guarantees: matrices are read where they are, in the layouts of experts.llm.quant (int8) and of four_bits beside this
 * file. Rows are rounded on the way: to 16 bits by blocks of 1024 numbers for int8, to 8 bits by the matrix's own
 * groups of 32 for int4; sums within a block or group are exact in integers. A result does not depend on the number of
 * threads or of rows. Threads are those of the caller's OpenMP team, so that there is no second one. The file is
 * compiled once for each instruction set, by including itself: `coserve_kernel` says which one a CPU takes.
 *
 * Integer dots of unsigned by signed bytes are those of llama.cpp and of Intel's VNNI; the layouts and the code are
 * not.
 */
#ifndef KERNEL
#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

enum { BLOCK = 1024, STRIP = 64, OUTS = 4, PAIR = 2 }; /* int8: numbers of a step, outputs of a thread, and of a tile */
enum { GROUP = 32, LANE_BYTES = 16, PARTS = 2 };       /* int4: of a block's 16 or 32 bytes, */
enum { COLUMNS = 4, STEPS = 8 };                       /* 16 have 4 columns of 8 outputs */
enum { MOST = 16, ROWS = 4, AHEAD = 8 }; /* int4: rows for one unpacking, for one reading; groups fetched ahead */
enum { NEAR = 32 };                 /* rows whose numbers stay near for a strip; positions for one step of attention */
enum { MOST_SIZE = 512 };           /* of a head */
enum { WORTH_SHARING = 8 * BLOCK }; /* numbers, by several threads, whose start takes 2 us */
enum { PLAIN, SWIGLU };

typedef void (*team_part)(void *);
typedef void (*team_call)(team_part, void *, unsigned, unsigned);

typedef struct {
    const void *rows, *norm; /* (count, in), twice as wide before SWIGLU; (in) or NULL */
    const void *values, *scale, *bias;
    void *result;                              /* (count, out) */
    void *room;                                /* for rounded rows, one at least */
    int64_t count, in, out, lanes, room_bytes; /* lanes: 0 for int8 */
    float epsilon;
    int is_bf16, has_bf16_scale, activation, threads;
} product;

typedef struct {
    product asked;
    int16_t *wide;   /* int8: (count, in) */
    int8_t *narrow;  /* int4: (count, in) */
    float *steps;    /* of each row's blocks or groups */
    float *sums;     /* int4: of each row's groups */
    int32_t *eights; /* int4: 8 times the sum of each group's rounded numbers */
    _Atomic int64_t next_row, next_chunk;
    int64_t chunks;
} job;

typedef struct {
    const void *queries, *keys, *values; /* (count, heads or kv heads, size), of tokens that are stored and attend */
    void *result;                        /* (count, heads, size) */
    void *const *sequences;              /* of each token: keys, (kv heads, positions, size), then values, of a layer */
    const int64_t *lengths;              /* of each token's sequence, with the token */
    int64_t query_stride, key_stride, value_stride;          /* numbers from one token's to the next */
    int64_t count, heads, kv_heads, size, positions, offset; /* offset: numbers from a sequence's first layer to this */
    int is_bf16, threads;
} attention;

typedef struct {
    attention asked;
    _Atomic int64_t next;
} attention_job;

typedef struct {
    void *numbers;                                   /* (count, heads, size), in place */
    const void *norm, *other_norm;                   /* of the first heads and of those behind them, (size), or NULL */
    const void *cosine, *sine;                       /* (count, size), or NULL */
    int64_t stride, count, heads, first_heads, size; /* stride: numbers from one token's to the next */
    float epsilon;
    int is_bf16;
} turning;

typedef struct {
    const product *products;  /* (layers, 4): to heads, of what attended, up, down; without rows and room */
    const void *const *norms; /* (layers, 2) as those of turning */
    void *tokens;             /* (count, hidden), in place */
    void *raised, *added;     /* (count, out) of the products up and down */
    void *room;
    attention attended; /* of the first layer */
    turning turned;     /* without norms */
    int64_t layers, room_bytes;
} passing;

static team_call share;

static inline float of_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float found;
    memcpy(&found, &wide, sizeof found);
    return found;
}

static inline uint16_t to_bf16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    if (number != number) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float at(const void *numbers, int64_t place, int is_bf16) {
    return is_bf16 ? of_bf16(((const uint16_t *)numbers)[place]) : ((const float *)numbers)[place];
}

static inline void put(void *numbers, int64_t place, float number, int is_bf16) {
    if (is_bf16) ((uint16_t *)numbers)[place] = to_bf16(number);
    else ((float *)numbers)[place] = number;
}

/* Address of a number. */
static inline void *from(const void *numbers, int64_t place, int is_bf16) {
    return (char *)(uintptr_t)numbers + place * (int64_t)(is_bf16 ? sizeof(uint16_t) : sizeof(float));
}

/* A finished number of the result. */
static inline void give(const product *asked, int64_t row, int64_t out, float number) {
    if (asked->bias) number += at(asked->bias, out, asked->is_bf16);
    put(asked->result, row * asked->out + out, number, asked->is_bf16);
}

#define JOIN_(name, kernel) name##_##kernel
#define JOIN(name, kernel) JOIN_(name, kernel)
#define OWN(name) JOIN(name, KERNEL)

#define KERNEL avx2
#define HAS_VNNI 0
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#include "products.c"
#pragma clang attribute pop
#undef KERNEL
#undef HAS_VNNI
#undef BYTES
#undef WORDS
#undef WIDENED

#define KERNEL avxvnni
#define HAS_VNNI 1
#define DPBUSD _mm256_dpbusd_avx_epi32
#define DPWSSD _mm256_dpwssd_avx_epi32
#pragma clang attribute push(__attribute__((target("avx2,fma,avxvnni"))), apply_to = function)
#include "products.c"
#pragma clang attribute pop
#undef KERNEL
#undef DPBUSD
#undef DPWSSD
#undef BYTES
#undef WORDS
#undef WIDENED

#define KERNEL avx512vnni
#define DPBUSD _mm256_dpbusd_epi32
#define DPWSSD _mm256_dpwssd_epi32
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512vl,avx512vnni"))), apply_to = function)
#include "products.c"
#pragma clang attribute pop
#undef KERNEL
#undef HAS_VNNI

typedef struct {
    const char *name;
    team_part round, multiply, attend;
    void (*turn)(const turning *);
} kernel;
static const kernel KERNELS[] = {
    {NULL, NULL, NULL, NULL, NULL},
    {"avx2", round_rows_avx2, multiply_avx2, attend_avx2, turn_avx2},
    {"avxvnni", round_rows_avxvnni, multiply_avxvnni, attend_avxvnni, turn_avxvnni},
    {"avx512vnni", round_rows_avx512vnni, multiply_avx512vnni, attend_avx512vnni, turn_avx512vnni},
};

static const kernel *chosen;

/* Place in KERNELS: by CPUID's leaves 1 and 7, and the registers that the system keeps (Intel's manual, 1, 14.3). */
static int fastest(void) {
    enum { FMA = 1 << 12, OSXSAVE = 1 << 27, AVX2 = 1 << 5, AVX512F = 1 << 16, AVX512VNNI = 1 << 11, AVXVNNI = 1 << 4 };
    unsigned a, b, c, d, first, kept, kept_high;
    if (!__get_cpuid(1, &a, &b, &first, &d) || (first & (FMA | OSXSAVE)) != (FMA | OSXSAVE)) return 0;
    __asm__("xgetbv" : "=a"(kept), "=d"(kept_high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (kept & 0x6) != 0x6 || !(b & AVX2)) return 0;
    if ((kept & 0xe6) == 0xe6 && b & AVX512F && b >> 31 && c & AVX512VNNI) return 3; /* b's last: AVX512VL */
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & AVXVNNI ? 2 : 1;
}

/* Name of the kernel that this CPU takes, NULL for none. `calling`: GOMP_parallel of the process's OpenMP, or NULL. */
PUBLIC const char *coserve_kernel(team_call calling) {
    share = calling;
    chosen = &KERNELS[fastest()];
    return chosen->name;
}

static void together(team_part part, void *one, int threads) {
    if (share && threads > 1) share(part, one, (unsigned)threads, 0);
    else part(one);
}

/* Rows one after the other, as many at once as have room when rounded. */
PUBLIC void coserve_product(const product *asked) {
    job one = {.asked = *asked};
    int64_t entering = asked->activation == SWIGLU ? 2 : 1;
    int64_t groups = asked->lanes ? asked->in / GROUP : (asked->in + BLOCK - 1) / BLOCK;
    int64_t row_bytes = groups * 3 * sizeof(float) + asked->in * (asked->lanes ? sizeof(int8_t) : sizeof(int16_t));
    int64_t most = asked->room_bytes / row_bytes;
    one.steps = asked->room;
    one.sums = one.steps + most * groups;
    one.eights = (int32_t *)(one.sums + most * groups);
    one.narrow = (int8_t *)(one.eights + most * groups);
    one.wide = (int16_t *)one.narrow;
    one.chunks = asked->lanes ? asked->out / asked->lanes : (asked->out + STRIP - 1) / STRIP;
    for (int64_t row = 0; row < asked->count; row += most) {
        int64_t count = one.asked.count = asked->count - row < most ? asked->count - row : most;
        one.asked.rows = from(asked->rows, row * entering * asked->in, asked->is_bf16);
        one.asked.result = from(asked->result, row * asked->out, asked->is_bf16);
        one.next_row = one.next_chunk = 0;
        together(chosen->round, &one, count * asked->in >= WORTH_SHARING ? asked->threads : 1);
        together(chosen->multiply, &one, asked->out * asked->in >= 8 * WORTH_SHARING ? asked->threads : 1);
    }
}

/* Stores the tokens' keys and values at the ends of their sequences, and attends to all of these. A size is a multiple
 * of 16. */
PUBLIC void coserve_attend(const attention *asked) {
    attention_job one = {.asked = *asked};
    int64_t numbers = 0;
    for (int64_t n = 0; n < asked->count; n++) numbers += asked->lengths[n] * asked->heads * asked->size;
    together(chosen->attend, &one, numbers >= 8 * WORTH_SHARING ? asked->threads : 1);
}

/* Normalises heads, rotates them, or both. A size is a multiple of 16. */
PUBLIC void coserve_turn(const turning *asked) { chosen->turn(asked); }

static void multiplied(const passing *asked, const product *matrix, const void *rows, void *result) {
    product own = *matrix;
    own.rows = rows, own.result = result, own.room = asked->room, own.room_bytes = asked->room_bytes;
    own.count = asked->turned.count, own.threads = asked->attended.threads;
    coserve_product(&own);
}

static void add(const passing *asked, const product *matrix) {
    int is_bf16 = matrix->is_bf16;
    for (int64_t n = 0; n < asked->turned.count * matrix->out; n++)
        put(asked->tokens, n, at(asked->tokens, n, is_bf16) + at(asked->added, n, is_bf16), is_bf16);
}

/* Single tokens through all layers of a model whose layers are products, norms, rotation, attention and sums alone. */
PUBLIC void coserve_pass(const passing *asked) {
    attention attended = asked->attended;
    int64_t layer_numbers = 2 * attended.kv_heads * attended.positions * attended.size;
    for (int64_t layer = 0; layer < asked->layers; layer++, attended.offset += layer_numbers) {
        const product *matrices = asked->products + 4 * layer;
        turning normed = asked->turned;
        normed.norm = asked->norms[2 * layer], normed.other_norm = asked->norms[2 * layer + 1];
        normed.cosine = normed.sine = NULL;
        multiplied(asked, matrices, asked->tokens, asked->turned.numbers);
        if (normed.norm) coserve_turn(&normed);
        if (asked->turned.cosine) coserve_turn(&asked->turned);
        coserve_attend(&attended);
        multiplied(asked, matrices + 1, attended.result, asked->added);
        add(asked, matrices + 1);
        multiplied(asked, matrices + 2, asked->tokens, asked->raised);
        multiplied(asked, matrices + 3, asked->raised, asked->added);
        add(asked, matrices + 3);
    }
}

#else /* what each instruction set has for itself */

#if HAS_VNNI
#define BYTES(sum, levels, row) sum = DPBUSD(sum, levels, row)
#define WORDS(sum, weights, row) sum = DPWSSD(sum, weights, row)
#define WIDENED(sum) (sum)
#else
#define BYTES(sum, levels, row) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(levels, row)) /* at most 30480 */
#define WORDS(sum, weights, row) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(weights, row))
#define WIDENED(sum) _mm256_madd_epi16(sum, _mm256_set1_epi16(1))
#endif

static inline __m256 OWN(load)(const void *numbers, int64_t place, int is_bf16) {
    if (!is_bf16) return _mm256_loadu_ps((const float *)numbers + place);
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)((const uint16_t *)numbers + place)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

static inline void OWN(store)(void *numbers, int64_t place, __m256 eight, int is_bf16) {
    if (!is_bf16) {
        _mm256_storeu_ps((float *)numbers + place, eight);
        return;
    }
    float single[8];
    _mm256_storeu_ps(single, eight);
    for (int n = 0; n < 8; n++) put(numbers, place + n, single[n], 1);
}

static inline float OWN(total)(__m256 numbers) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(numbers), _mm256_extractf128_ps(numbers, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

static inline float OWN(largest)(__m256 numbers) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(numbers), _mm256_extractf128_ps(numbers, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

/* 2 ** x by its nearest whole power and a polynomial of the rest, relative error below 3e-7; x within fp32's range. */
static inline __m256 OWN(power)(__m256 x) {
    x = _mm256_min_ps(_mm256_set1_ps(127.0f), _mm256_max_ps(_mm256_set1_ps(-126.0f), x)); /* NaN stays */
    __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 rest = _mm256_mul_ps(_mm256_sub_ps(x, whole), _mm256_set1_ps(0.6931471805599453f));
    __m256 sum = _mm256_set1_ps(1.0f / 5040);
    const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (int n = 0; n < 7; n++) sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(factors[n]));
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(sum, _mm256_castsi256_ps(exponent));
}

/* Eight numbers of a row as the matrix takes them. `norm`: factor of the whole row. */
static inline __m256 OWN(entering)(const product *asked, int64_t row, int64_t place, float norm) {
    if (asked->activation == SWIGLU) {
        __m256 gate = OWN(load)(asked->rows, row * 2 * asked->in + place, asked->is_bf16);
        __m256 up = OWN(load)(asked->rows, (row * 2 + 1) * asked->in + place, asked->is_bf16);
        __m256 falling = OWN(power)(_mm256_mul_ps(gate, _mm256_set1_ps(-1.4426950408889634f)));
        return _mm256_mul_ps(_mm256_div_ps(gate, _mm256_add_ps(_mm256_set1_ps(1.0f), falling)), up);
    }
    __m256 numbers = OWN(load)(asked->rows, row * asked->in + place, asked->is_bf16);
    if (!asked->norm) return numbers;
    return _mm256_mul_ps(_mm256_mul_ps(numbers, _mm256_set1_ps(norm)), OWN(load)(asked->norm, place, asked->is_bf16));
}

static inline float OWN(norm_of)(const product *asked, int64_t row) {
    if (!asked->norm) return 1.0f;
    __m256 squares = _mm256_setzero_ps();
    for (int64_t place = 0; place < asked->in; place += 8) {
        __m256 numbers = OWN(load)(asked->rows, row * asked->in + place, asked->is_bf16);
        squares = _mm256_fmadd_ps(numbers, numbers, squares);
    }
    float mean = OWN(total)(squares) / (float)asked->in + asked->epsilon;
    return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean)));
}

/* Step of numbers whose largest becomes `most`; a number that is not finite makes all of them so. */
static inline float OWN(step_of)(const __m256 *numbers, int64_t count, float most) {
    __m256 largest = _mm256_setzero_ps(), sum = _mm256_setzero_ps();
    for (int64_t n = 0; n < count; n++) {
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), numbers[n]));
        sum = _mm256_fmadd_ps(numbers[n], _mm256_setzero_ps(), sum); /* 0, or NaN */
    }
    return OWN(largest)(largest) / most + OWN(total)(sum);
}

static inline __m256i OWN(rounded)(__m256 numbers, float step) {
    float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    return _mm256_cvtps_epi32(_mm256_mul_ps(numbers, _mm256_set1_ps(inverse)));
}

static void OWN(to_words)(job *one, int64_t row) {
    const product *asked = &one->asked;
    float norm = OWN(norm_of)(asked, row);
    int64_t blocks = (asked->in + BLOCK - 1) / BLOCK;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * BLOCK, eights = (asked->in - first < BLOCK ? asked->in - first : BLOCK) / 8;
        __m256 numbers[BLOCK / 8];
        for (int64_t n = 0; n < eights; n++) numbers[n] = OWN(entering)(asked, row, first + 8 * n, norm);
        float step = one->steps[row * blocks + block] = OWN(step_of)(numbers, eights, 32767.0f);
        int16_t *into = one->wide + row * asked->in + first;
        for (int64_t n = 0; n < eights; n++) {
            __m256i whole = OWN(rounded)(numbers[n], step);
            __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
            _mm_storeu_si128((__m128i *)(into + 8 * n), packed);
        }
    }
}

static void OWN(to_bytes)(job *one, int64_t row) {
    const product *asked = &one->asked;
    float norm = OWN(norm_of)(asked, row);
    int64_t groups = asked->in / GROUP;
    for (int64_t group = 0; group < groups; group++) {
        __m256 numbers[4], sum = _mm256_setzero_ps();
        for (int n = 0; n < 4; n++) {
            numbers[n] = OWN(entering)(asked, row, group * GROUP + 8 * n, norm);
            sum = _mm256_add_ps(sum, numbers[n]);
        }
        int64_t place = row * groups + group;
        float step = one->steps[place] = OWN(step_of)(numbers, 4, 127.0f);
        one->sums[place] = OWN(total)(sum);
        __m256i added = _mm256_setzero_si256();
        for (int n = 0; n < 4; n++) {
            __m256i whole = OWN(rounded)(numbers[n], step);
            added = _mm256_add_epi32(added, whole);
            __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
            _mm_storel_epi64(
                (__m128i *)(one->narrow + row * asked->in + group * GROUP + 8 * n), _mm_packs_epi16(words, words)
            );
        }
        one->eights[place] = 8 * (int32_t)OWN(total)(_mm256_cvtepi32_ps(added));
    }
}

static void OWN(round_rows)(void *given) {
    job *one = given;
    int64_t row;
    while ((row = atomic_fetch_add(&one->next_row, 1)) < one->asked.count) {
        if (one->asked.lanes) OWN(to_bytes)(one, row);
        else OWN(to_words)(one, row);
    }
}

/* Some rows, one or two, times `outs` rows of an int8 matrix. */
static inline __attribute__((always_inline)) void
OWN(tile)(const job *one, int64_t row, int64_t out, const int rows, const int outs) {
    const product *asked = &one->asked;
    const int8_t *matrix = (const int8_t *)asked->values + out * asked->in;
    const int16_t *wide = one->wide + row * asked->in;
    int64_t blocks = (asked->in + BLOCK - 1) / BLOCK;
    __m256 found[PAIR][OUTS];
    for (int n = 0; n < rows; n++)
        for (int o = 0; o < outs; o++) found[n][o] = _mm256_setzero_ps();
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * BLOCK, end = asked->in - first < BLOCK ? asked->in : first + BLOCK;
        __m256i sums[PAIR][OUTS];
        for (int n = 0; n < rows; n++)
            for (int o = 0; o < outs; o++) sums[n][o] = _mm256_setzero_si256();
        for (int64_t place = first; place < end; place += 16) {
            _mm_prefetch((const char *)(matrix + outs * asked->in + outs * place), _MM_HINT_T0); /* the next tile's */
            __m256i own[PAIR];
            for (int n = 0; n < rows; n++) own[n] = _mm256_loadu_si256((const __m256i *)(wide + n * asked->in + place));
            for (int o = 0; o < outs; o++) {
                __m256i weights =
                    _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(matrix + o * asked->in + place)));
                for (int n = 0; n < rows; n++) WORDS(sums[n][o], weights, own[n]);
            }
        }
        for (int n = 0; n < rows; n++) {
            __m256 step = _mm256_set1_ps(one->steps[(row + n) * blocks + block]);
            for (int o = 0; o < outs; o++)
                found[n][o] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[n][o]), step, found[n][o]);
        }
    }
    for (int n = 0; n < rows; n++)
        for (int o = 0; o < outs; o++)
            give(asked, row + n, out + o, OWN(total)(found[n][o]) * at(asked->scale, out + o, asked->has_bf16_scale));
}

static void OWN(strip)(const job *one, int64_t first) {
    int64_t end = first + STRIP < one->asked.out ? first + STRIP : one->asked.out;
    for (int64_t begin = 0; begin < one->asked.count; begin += NEAR) {
        int64_t last = begin + NEAR < one->asked.count ? begin + NEAR : one->asked.count, out = first;
        for (; out + OUTS <= end; out += OUTS) {
            int64_t row = begin;
            for (; row + PAIR <= last; row += PAIR) OWN(tile)(one, row, out, PAIR, OUTS);
            if (row < last) OWN(tile)(one, row, out, 1, OUTS);
        }
        for (; out < end; out++)
            for (int64_t row = begin; row < last; row++) OWN(tile)(one, row, out, 1, 1);
    }
}

/* Levels of 32 rows at four places: by columns of eight rows, four of the low halves of bytes, four of the high ones.
 */
static inline __attribute__((always_inline)) void
OWN(unpack)(const uint8_t *bytes, int64_t stride, __m256i levels[COLUMNS]) {
    const __m256i low = _mm256_set1_epi8(15), shifts = _mm256_set_epi64x(4, 4, 0, 0);
    __m256i four[4];
    for (int k = 0; k < 4; k++) {
        __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(bytes + k * stride)));
        four[k] = _mm256_and_si256(_mm256_srlv_epi64(both, shifts), low);
    }
    __m256i first = _mm256_unpacklo_epi8(four[0], four[1]), second = _mm256_unpackhi_epi8(four[0], four[1]);
    __m256i third = _mm256_unpacklo_epi8(four[2], four[3]), fourth = _mm256_unpackhi_epi8(four[2], four[3]);
    levels[0] = _mm256_unpacklo_epi16(first, third);
    levels[1] = _mm256_unpackhi_epi16(first, third);
    levels[2] = _mm256_unpacklo_epi16(second, fourth);
    levels[3] = _mm256_unpackhi_epi16(second, fourth);
}

static inline __m256i OWN(four_places)(const int8_t *narrow) {
    int32_t numbers;
    memcpy(&numbers, narrow, sizeof numbers);
    return _mm256_set1_epi32(numbers);
}

/* Adds a group of one row: `dots` of levels and rounded numbers, by the column's steps and middles. */
static inline __m256
OWN(added)(const job *one, int64_t place, __m256i dots, __m256 steps, __m256 middles, __m256 found) {
    __m256 whole = _mm256_cvtepi32_ps(_mm256_sub_epi32(WIDENED(dots), _mm256_set1_epi32(one->eights[place])));
    found = _mm256_fmadd_ps(_mm256_mul_ps(whole, _mm256_set1_ps(one->steps[place])), steps, found);
    return _mm256_fmadd_ps(middles, _mm256_set1_ps(one->sums[place]), found);
}

/* A group of a few rows times one column of eight: each level is read once for them. */
static inline __attribute__((always_inline)) void OWN(column)(
    const job *one, __m256i levels[STEPS][COLUMNS], int c, const int8_t *narrow, int64_t place, const int rows,
    __m256 steps, __m256 middles, __m256 found[][COLUMNS]
) {
    __m256i dots[ROWS];
    for (int n = 0; n < rows; n++) dots[n] = _mm256_setzero_si256();
    for (int k = 0; k < STEPS; k++) {
        __m256i own = levels[k][c];
        for (int n = 0; n < rows; n++) BYTES(dots[n], own, OWN(four_places)(narrow + n * one->asked.in + 4 * k));
    }
    for (int n = 0; n < rows; n++)
        found[n][c] = OWN(added)(one, place + n * (one->asked.in / GROUP), dots[n], steps, middles, found[n][c]);
}

/* A group of up to MOST rows times 32 rows of an int4 matrix: those of 16 of a block's 16 or 32 bytes. */
static inline __attribute__((always_inline)) void OWN(sixteen)(
    const job *one, int64_t group, int64_t part, const uint8_t *bytes, const uint16_t *scales, int64_t begin,
    const int64_t rows, __m256 found[][COLUMNS]
) {
    const product *asked = &one->asked;
    int64_t half = asked->lanes / 2, groups = asked->in / GROUP;
    const int8_t *narrow = one->narrow + begin * asked->in + group * GROUP;
    const char *ahead = (const char *)bytes + AHEAD * GROUP * half + part * (4 * LANE_BYTES - LANE_BYTES);
    __m256i levels[STEPS][COLUMNS], dots[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) dots[c] = _mm256_setzero_si256();
    for (int n = 0; n < STEPS; n++) {
        _mm_prefetch(ahead + 4 * n * half, _MM_HINT_T0);
        OWN(unpack)(bytes + 4 * n * half, half, levels[n]);
        if (rows == 1)
            for (int c = 0; c < COLUMNS; c++) BYTES(dots[c], levels[n][c], OWN(four_places)(narrow + 4 * n));
    }
    _mm_prefetch((const char *)(scales + 2 * AHEAD * asked->out), _MM_HINT_T0);
    _mm_prefetch((const char *)(scales + 2 * (AHEAD * asked->out + half)), _MM_HINT_T0);
    for (int c = 0; c < COLUMNS; c++) {
        __m256i both = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(scales + 8 * c))),
            _mm_loadu_si128((const __m128i *)(scales + 2 * half + 8 * c)), 1
        );
        __m256 steps = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        __m256 middles = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000)));
        int64_t n = 0, place = begin * groups + group;
        if (rows == 1) found[0][c] = OWN(added)(one, place, dots[c], steps, middles, found[0][c]);
        else {
            for (; n + ROWS <= rows; n += ROWS)
                OWN(column)(
                    one, levels, c, narrow + n * asked->in, place + n * groups, ROWS, steps, middles, &found[n]
                );
            for (; n < rows; n++)
                OWN(column)(one, levels, c, narrow + n * asked->in, place + n * groups, 1, steps, middles, &found[n]);
        }
    }
}

/* Up to MOST rows times a block of an int4 matrix, group by group: its bytes are near once. */
static inline __attribute__((always_inline)) void
OWN(block)(const job *one, int64_t block, int64_t begin, const int64_t rows) {
    const product *asked = &one->asked;
    int64_t half = asked->lanes / 2, parts = half / LANE_BYTES, groups = asked->in / GROUP;
    const uint8_t *bytes = (const uint8_t *)asked->values + block * asked->in * half;
    const uint16_t *scales = (const uint16_t *)asked->scale + 2 * block * asked->lanes;
    __m256 found[PARTS][MOST][COLUMNS];
    for (int64_t n = 0; n < parts * MOST; n++)
        for (int c = 0; c < COLUMNS; c++) found[n / MOST][n % MOST][c] = _mm256_setzero_ps();
    for (int64_t group = 0; group < groups; group++, bytes += GROUP * half, scales += 2 * asked->out)
        for (int64_t part = 0; part < parts; part++)
            OWN(sixteen)(
                one, group, part, bytes + part * LANE_BYTES, scales + 2 * part * LANE_BYTES, begin, rows, found[part]
            );
    for (int64_t part = 0; part < parts; part++)
        for (int64_t n = 0; n < rows; n++)
            for (int c = 0; c < COLUMNS; c++) {
                int64_t out = block * asked->lanes + part * LANE_BYTES + 4 * c;
                float eight[8];
                _mm256_storeu_ps(eight, found[part][n][c]);
                for (int o = 0; o < 8; o++) give(asked, begin + n, out + o % 4 + o / 4 * half, eight[o]);
            }
}

static void OWN(multiply)(void *given) {
    job *one = given;
    int64_t chunk, count = one->asked.count;
    while ((chunk = atomic_fetch_add(&one->next_chunk, 1)) < one->chunks)
        if (!one->asked.lanes) OWN(strip)(one, chunk * STRIP);
        else if (count == 1) OWN(block)(one, chunk, 0, 1);
        else
            for (int64_t row = 0; row < count; row += MOST)
                OWN(block)(one, chunk, row, count - row < MOST ? count - row : MOST);
}

/* One query over up to NEAR positions, joined with those before by the largest score and the sum (FlashAttention, arXiv
 * 2205.14135, algorithm 1). */
static inline __attribute__((always_inline)) void OWN(attend_near)(
    const float *query, const void *keys, const void *values, int64_t count, int64_t size, float scale, float *most,
    float *sum, float *found, const int is_bf16
) {
    float scores[NEAR];
    for (int64_t n = 0; n < NEAR; n++) scores[n] = -INFINITY;
    float highest = *most;
    for (int64_t n = 0; n < count; n++) {
        __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
        for (int64_t d = 0; d < size; d += 16) {
            even = _mm256_fmadd_ps(_mm256_loadu_ps(query + d), OWN(load)(keys, n * size + d, is_bf16), even);
            odd = _mm256_fmadd_ps(_mm256_loadu_ps(query + d + 8), OWN(load)(keys, n * size + d + 8, is_bf16), odd);
        }
        scores[n] = OWN(total)(_mm256_add_ps(even, odd)) * scale;
        highest = scores[n] > highest || scores[n] != scores[n] ? scores[n] : highest;
    }
    const float binary = 1.4426950408889634f;
    float shrunk = _mm256_cvtss_f32(OWN(power)(_mm256_set1_ps((*most - highest) * binary)));
    __m256 added = _mm256_setzero_ps();
    for (int64_t n = 0; n < NEAR; n += 8) {
        __m256 below = _mm256_sub_ps(_mm256_loadu_ps(scores + n), _mm256_set1_ps(highest));
        __m256 shares = OWN(power)(_mm256_mul_ps(below, _mm256_set1_ps(binary)));
        _mm256_storeu_ps(scores + n, shares);
        added = _mm256_add_ps(added, n < count ? shares : _mm256_setzero_ps());
    }
    *most = highest;
    *sum = *sum * shrunk + OWN(total)(added);
    for (int64_t d = 0; d < size; d += 8) {
        __m256 own = _mm256_mul_ps(_mm256_loadu_ps(found + d), _mm256_set1_ps(shrunk));
        for (int64_t n = 0; n < count; n++)
            own = _mm256_fmadd_ps(_mm256_set1_ps(scores[n]), OWN(load)(values, n * size + d, is_bf16), own);
        _mm256_storeu_ps(found + d, own);
    }
}

static inline __attribute__((always_inline)) void
OWN(attend_head)(const attention *asked, int64_t token, int64_t head, const int is_bf16) {
    int64_t size = asked->size, group = asked->heads / asked->kv_heads, length = asked->lengths[token];
    void *keys = from(asked->sequences[token], asked->offset + head * asked->positions * size, is_bf16);
    void *values = from(keys, asked->kv_heads * asked->positions * size, is_bf16);
    size_t bytes = (size_t)size * (is_bf16 ? sizeof(uint16_t) : sizeof(float));
    memcpy(
        from(keys, (length - 1) * size, is_bf16), from(asked->keys, token * asked->key_stride + head * size, is_bf16),
        bytes
    );
    memcpy(
        from(values, (length - 1) * size, is_bf16),
        from(asked->values, token * asked->value_stride + head * size, is_bf16), bytes
    );
    for (int64_t n = head * group; n < (head + 1) * group; n++) {
        float query[MOST_SIZE], found[MOST_SIZE], most = -INFINITY, sum = 0.0f, scale = 1.0f / sqrtf((float)size);
        for (int64_t d = 0; d < size; d += 8) {
            _mm256_storeu_ps(query + d, OWN(load)(asked->queries, token * asked->query_stride + n * size + d, is_bf16));
            _mm256_storeu_ps(found + d, _mm256_setzero_ps());
        }
        for (int64_t first = 0; first < length; first += NEAR)
            OWN(attend_near)(
                query, from(keys, first * size, is_bf16), from(values, first * size, is_bf16),
                length - first < NEAR ? length - first : NEAR, size, scale, &most, &sum, found, is_bf16
            );
        for (int64_t d = 0; d < size; d += 8)
            OWN(store)(
                asked->result, (token * asked->heads + n) * size + d,
                _mm256_div_ps(_mm256_loadu_ps(found + d), _mm256_set1_ps(sum)), is_bf16
            );
    }
}

static void OWN(attend)(void *given) {
    attention_job *one = given;
    int64_t item;
    while ((item = atomic_fetch_add(&one->next, 1)) < one->asked.count * one->asked.kv_heads) {
        int64_t token = item / one->asked.kv_heads, head = item % one->asked.kv_heads;
        if (one->asked.is_bf16) OWN(attend_head)(&one->asked, token, head, 1);
        else OWN(attend_head)(&one->asked, token, head, 0);
    }
}

static void OWN(turn_head)(const turning *asked, int64_t token, int64_t head) {
    const void *norm = head < asked->first_heads ? asked->norm : asked->other_norm;
    int64_t size = asked->size, angle = token * size;
    void *numbers = from(asked->numbers, token * asked->stride + head * size, asked->is_bf16);
    float factor = 1.0f;
    if (norm) {
        product row = {.rows = numbers, .norm = norm, .in = size, .epsilon = asked->epsilon, .is_bf16 = asked->is_bf16};
        factor = OWN(norm_of)(&row, 0);
    }
    for (int64_t d = 0; d < size / 2; d += 8) {
        __m256 halves[2];
        for (int n = 0; n < 2; n++) {
            int64_t place = d + n * size / 2;
            halves[n] = _mm256_mul_ps(OWN(load)(numbers, place, asked->is_bf16), _mm256_set1_ps(factor));
            if (norm) halves[n] = _mm256_mul_ps(halves[n], OWN(load)(norm, place, asked->is_bf16));
        }
        for (int n = 0; n < 2; n++) {
            int64_t place = d + n * size / 2;
            __m256 turned = halves[n];
            if (asked->cosine)
                turned = _mm256_fmadd_ps(
                    halves[1 - n], OWN(load)(asked->sine, angle + place, asked->is_bf16),
                    _mm256_mul_ps(halves[n], OWN(load)(asked->cosine, angle + place, asked->is_bf16))
                );
            OWN(store)(numbers, place, turned, asked->is_bf16);
        }
    }
}

static void OWN(turn)(const turning *asked) {
    for (int64_t token = 0; token < asked->count; token++)
        for (int64_t head = 0; head < asked->heads; head++) OWN(turn_head)(asked, token, head);
}
#endif
