/* The C ABI between whoever dispatches and the kernels: plain pointers, sizes and strides; no C++ type crosses it.
 *
 * Formulas, for row n of the weight, in-feature k, block b = k / block:
 *     y[m,n] = sum_k x[m,k] * w[n,k] + bias[n]
 *     w[n,k] = (scale[n,b] * code_value[q[n,k]] + offset[n,b]) * global[n]        second = OFFSET or NONE
 *     w[n,k] = (code_value[q[n,k]] - zero[n,b]) * scale[n,b] * global[n]          second = ZERO
 * Where blocks are in super-blocks, scale and offset are each a stored number times its super-block's, rounded to float32.
 *
 * Prepared layout: tiles of 16 rows. A tile is its super-blocks' numbers, then its groups one after another. A super-block has
 * 16 float16 numbers for the scales, and 16 for the offsets where there are any. A group holds the scales of `block`
 * in-features (of two blocks of 16 where block is 16), the second numbers, then its chunks of 32 in-features. A chunk of
 * 4-bit codes is 4 lines of 64 bytes: byte 4 r + i of line l holds, for row r of the tile, in-feature 8 l + i in its low
 * nibble and 8 l + 4 + i in its high one. A chunk of 8-bit codes is 8 lines: byte 4 r + i of line l is in-feature 4 l + i,
 * in two's complement: 128 less than an unsigned code. Codes that span fewer values are held in as many bits: a chunk is
 * held_bits lines, and layout.hpp says which bits of them are whose. Where scale and offset of a block are below 16, both
 * lie in one byte. Rows beyond N have scale 0; in-features beyond K are bits of 0 and meet activations of 0.
 */
#ifndef Q4_CPU_H
#define Q4_CPU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define Q4_CPU_ABI_VERSION 14
#define Q4_TILE_ROWS 16
#define Q4_CHUNK 32

/* The last two are the halves of one byte, for the scale and the offset of blocks in super-blocks; a source has U8 for both. */
typedef enum { Q4_F32, Q4_BF16, Q4_F16, Q4_E4M3, Q4_E8M0, Q4_U8, Q4_I8, Q4_I32, Q4_LOW_U4, Q4_HIGH_U4 } q4_type;
typedef enum { Q4_NONE, Q4_OFFSET, Q4_ZERO } q4_second;
typedef enum { Q4_LOW_FIRST, Q4_HIGH_FIRST, Q4_HALF_SPLIT, Q4_BYTES } q4_order;
/* Activations as they come, or rounded to int8 or int16 with a scale for each 32 in-features, but for outliers. */
typedef enum { Q4_EXACT, Q4_A8, Q4_A16 } q4_family;
/* Where a machine has several, the later one is preferred. */
typedef enum {
    Q4_ISA_NONE,
    Q4_ISA_AVX2,
    Q4_ISA_AVXVNNI,
    Q4_ISA_AVX512,
    Q4_ISA_NEON_DOTPROD,
    Q4_ISA_NEON_I8MM
} q4_isa;

/* One kind of prepared weight. Where `second` is ZERO, each 4-bit code is its own level and value; where it is OFFSET, and for
 * 8 bits, step is 1, and a code's value is level - center. Sizes are at most 2^30. */
typedef struct {
    int64_t rows;             /* N */
    int64_t columns;          /* K */
    int64_t block;            /* in-features per scale: 16 or a multiple of 32 */
    int64_t super_blocks;     /* blocks per super-block, of bytes or halves of these: a divisor of a row's, even where block is 16; 0 without or for ZERO */
    int32_t bits;             /* of a code in a source: 4 or 8 */
    int32_t held_bits;        /* of a code in a tile: as many, or 2 or 3 of 4, 5 or 6 of 8, but not for ZERO */
    int32_t first;            /* the level that is held as 0 where held_bits are fewer, else 0. Codes beyond what they hold give wrong
                                 numbers. Each 4-bit code is its own level then, step is 1, and a code's value is level - center */
    int32_t scale_type;       /* q4_type */
    int32_t second;           /* q4_second */
    int32_t second_type;      /* q4_type */
    int32_t is_unsigned;      /* 8 bits: whether codes are 0 … 255, each its own level; else its level is 128 more */
    float codebook[16];       /* value of each 4-bit code; unused for 8 bits */
    /* w4a8: value of code q is step * (level[q] - center); exact where the codebook is a multiple of whole numbers.
     * center is whole; where a 4-bit level is above 24 it is 128, and no level is 0. With a second number step is 1, and the
     * codebook is level - center. For 8 bits without one it is 128, too. */
    uint8_t level[16];
    float center;
    float step;
    /* int16 activations: value of code q is word_step * word[q], |word[q]| <= 8191, where a level is above 24, bits are 4
     * and there is no second number; elsewhere it is as for w4a8, and these are not read. */
    int16_t word[16];
    float word_step;
} q4_matrix;

/* Where codes and numbers of an unprepared weight lie; strides in bytes. */
typedef struct {
    const uint8_t *codes;
    int64_t code_row, code_group, code_byte; /* strides of rows, of groups of `group_bytes` bytes, of bytes in a group */
    int64_t group_bytes;
    int32_t order; /* q4_order */
    int32_t half;  /* codes per half of a HALF_SPLIT group */
    const uint8_t *scale;
    int64_t scale_row, scale_block;
    const uint8_t *second;
    int64_t second_row, second_block;
    const uint8_t *super_scale, *super_second;   /* float16, one for each super-block, row after row */
    int64_t super_scale_step, super_second_step; /* from one to the next */
} q4_source;

/* How x meets a weight whose columns are stored in another order, or whose in-features have a factor each: stored column j
 * meets x[order[j]] * factor[order[j]], rounded to float32. An entry of `order` that is no in-feature stands for x = 0. */
typedef struct {
    const int64_t *order; /* NULL or [K] */
    const void *factor;   /* NULL or [K] */
    int32_t factor_type;  /* one of those that x may have */
} q4_inputs;

/* One call; rows of x and y are contiguous along their last axis. */
typedef struct {
    const uint8_t *tiles;
    const float *global_scale; /* NULL, or one number, or N of them; float32 */
    int64_t global_count;
    int32_t global_divides;
    const void *x;
    int64_t x_rows, x_stride; /* M; elements */
    int32_t x_type;
    void *y;
    int64_t y_stride;
    int32_t y_type;
    const void *bias; /* NULL or [N] of y's type */
    int32_t family;   /* q4_family */
    int32_t threads;
    int64_t *outlier_rows; /* NULL, or raised by the rows of x that had outliers: int8 and int16 alone */
    q4_inputs inputs;
} q4_call;

int32_t q4_cpu_abi_version(void);
/* The name of an instruction set, as people write it; NULL for a number that is none. */
const char *q4_cpu_isa_name(int32_t isa);
/* 1 where this machine has it, 0 where it has not, -1 where it was not compiled in. */
int32_t q4_cpu_has_isa(int32_t isa);
/* Whether its kernels were ever run on hardware. Those of the others run only for who asks for them by name. */
int32_t q4_cpu_isa_was_run(int32_t isa);
/* The best instruction set for who does not ask: compiled in, run on hardware before, and had by this machine. */
int32_t q4_cpu_best_isa(void);
/* From how many rows of x on a family decodes weights into panels first, which other kernels then read: what is proven for
 * fewer rows is not proven for more. 0 where it never does, or where there is no such instruction set or family. */
int64_t q4_cpu_panel_from(int32_t isa, int32_t family);
int64_t q4_cpu_prepared_bytes(const q4_matrix *matrix);
/* Each of the following returns 0; -1 for arguments that make no sense, before anything is written: a null pointer where
 * something is read or written, a size below 1 (a count below 0), a number that stands for no type, order, family or
 * instruction set, rows of y that overlap, a row that is not there, an address that is no multiple of its element's size
 * (x, y, bias, global_scale); -2 without memory. Strides of what is read may be 0 or negative. */
/* Fill tiles [prepared_bytes] from a source. */
int32_t q4_cpu_pack(const q4_matrix *matrix, const q4_source *source, uint8_t *tiles, int32_t threads);
/* The inverse, for rows[count] (NULL: the first `count`): codes one per byte [count, K], scale and second as stored, contiguous. */
int32_t q4_cpu_unpack(const q4_matrix *matrix, const uint8_t *tiles, const int64_t *rows, int64_t count, uint8_t *codes,
                      uint8_t *scale, uint8_t *second, int32_t threads);
int32_t q4_cpu_linear(const q4_matrix *matrix, const q4_call *call, int32_t isa);

/* The product with rows of 0 and 1: y[m,n] = sum of w[n,k] over the k where x[m,k] is not 0, + bias[n], with the bits of the
 * exact family. What is 0 costs nothing, but for a look at it. */
typedef struct {
    const uint8_t *tiles;
    const float *global_scale; /* as in a call */
    int64_t global_count;
    int32_t global_divides;
    const uint8_t *x; /* bytes */
    int64_t rows, x_stride; /* M */
    float *y;
    int64_t y_stride;  /* at least N */
    const float *bias; /* NULL or [N] */
    int32_t threads;
    const int64_t *order; /* as in q4_inputs */
} q4_spikes;
int32_t q4_cpu_spikes(const q4_matrix *matrix, const q4_spikes *spikes, int32_t isa);

/* Programs: steps over views of the caller's memory, run by one call on one team of threads. What each operation computes,
 * which views it has and which numbers, is described in plugins/programs/src/q4_programs/program.py; the order is the same. */
typedef enum {
    Q4_EMBEDDING,
    Q4_LINEAR,
    Q4_RMS_NORM,
    Q4_LAYER_NORM,
    Q4_ROTARY,
    Q4_STORE,
    Q4_ATTENTION,
    Q4_ADD,
    Q4_MULTIPLY,
    Q4_AFFINE,
    Q4_RELU,
    Q4_GELU,
    Q4_GELU_TANH,
    Q4_SILU,
    Q4_SIGMOID,
    Q4_TANH,
    Q4_SOFTMAX,
    Q4_COPY,
    Q4_ARGMAX,
    Q4_TOP_K,
    Q4_INTEGRATE,
    Q4_FIRE,
    Q4_SPIKES,
    Q4_SEND,
    Q4_TAKE,
    Q4_ROW,
    Q4_STORE_ROW,
    Q4_PACK,
    Q4_UNPACK,
    Q4_ATTEND_SPANS,
    Q4_MEAN_SPANS
} q4_op;

/* Rows of contiguous columns: float32, int64 where an operation says so, or the type of a cache. */
typedef struct {
    void *data;
    int64_t rows, columns, stride; /* from row to row, in elements: at least `columns` */
} q4_view;

/* A packed layer, as in a call; an embedding's has no inputs. */
typedef struct {
    q4_matrix matrix;
    const uint8_t *tiles;
    const float *global_scale;
    int64_t global_count;
    int32_t global_divides;
    int32_t family;
    q4_inputs inputs;
} q4_layer;

/* Sparse synapses, entries by source, then by target. Entry e is on the target of the entry before it plus gaps[e]; one whose
 * delay is 0 is no synapse. Its weight is offset + scale * code, of codes two to a byte and of levels for each 32 entries. */
typedef struct {
    int64_t sources, targets;
    int64_t entries;       /* whole blocks of 32 */
    const int64_t *starts; /* [sources + 1], the first entry of each source */
    const int32_t *first;  /* [sources], the target of a source's first entry, whose gap is 0 */
    const void *gaps;      /* [entries], unsigned */
    int32_t gap_bytes;     /* 1 or 2 */
    const uint8_t *delays; /* [entries] */
    const uint8_t *codes;  /* [entries / 2] */
    const uint16_t *levels; /* [entries / 32, 2], scale and offset: float16 */
} q4_synapses;

#define Q4_MOST_INPUTS 7
#define Q4_MOST_OUTPUTS 3
#define Q4_MOST_NUMBERS 3

typedef struct {
    int32_t op; /* q4_op */
    int32_t input_count, output_count, number_count;
    q4_view inputs[Q4_MOST_INPUTS];
    q4_view outputs[Q4_MOST_OUTPUTS];
    double numbers[Q4_MOST_NUMBERS];
    const q4_layer *layer; /* read by q4_cpu_program_make alone; NULL for an operation without a packed layer */
    const q4_synapses *synapses; /* likewise, of SEND; what it points to must stay where it is */
    int32_t cache_type; /* of keys and values of STORE and ATTENTION: Q4_F32, Q4_F16, or Q4_I8, whose rows end with the four bytes
                           of a float32 scale, as columns of their own; Q4_F32 elsewhere */
} q4_step;

/* Memory that each run gives anew: a view that lies in it is as far from its first byte, and `step` bytes further in each round.
 * A step of Q4_LINEAR or Q4_EMBEDDING has none, and no token, position or clock lies there. */
typedef struct {
    void *data;    /* at a run; when a program is made, where the views point to */
    int64_t bytes; /* of a round */
    int64_t step;  /* at a run: from round to round, in bytes; 0 for the same memory in all */
} q4_stream;

/* What happens between rounds: turn(context, round, rounds) is called by one thread before each round, from 0, once everything of
 * the round before is written, and with round = rounds after the last. Other than 0 ends the run before that round. */
typedef struct {
    int32_t (*turn)(void *context, int64_t round, int64_t rounds);
    void *context;
} q4_turns;

typedef struct q4_program q4_program;

/* Check and bind steps for up to that many threads. All memory that views and layers point to must stay where it is. Takes
 * whatever memory runs need. `clock` is NULL, or one number that is one more after each round. Returns as above, or 1 + the
 * number of the first step that makes no sense. */
int32_t q4_cpu_program_make(const q4_step *steps, int64_t count, int32_t threads, int32_t isa, int64_t *clock, const q4_stream *streams,
                            int64_t stream_count, q4_program **program);
/* Run every step, in their order, for some rounds, with no more threads than it was made for; the bits are the same for any
 * number. Takes no memory. As many streams as it was made with: none of them may overlap another or a view that a step
 * writes, and of one that is written no round may overlap another but where all are the same. Returns as above; -3 where the program is running already; 1 + the number of a step whose token,
 * position or clock is out of range, -4 where the number of tokens is, before anything is written. turns: NULL, or what is called
 * between rounds; the clock says how many rounds were run. */
int32_t q4_cpu_program_run(q4_program *program, int32_t threads, int64_t rounds, const q4_stream *streams, const q4_turns *turns);
/* Let each run be of as many tokens as *tokens says then, from 1 to `most` (2 or more), of which the steps are made: rows of x
 * and y, and positions, are a multiple of `most`, and those of the first tokens are read and written. Before the first run; steps
 * are those from Q4_EMBEDDING to Q4_ARGMAX, and of spans. Returns as q4_cpu_program_make. */
int32_t q4_cpu_program_tokens(q4_program *program, const int64_t *tokens, int64_t most);
/* How many rows of x of that step, a packed product, had outliers in the last run. */
int64_t q4_cpu_program_outlier_rows(const q4_program *program, int64_t step);
void q4_cpu_program_free(q4_program *program);

#ifdef __cplusplus
}
#endif
#endif
