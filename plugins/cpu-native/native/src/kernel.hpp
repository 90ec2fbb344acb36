// What a call's driver and the kernels of each instruction set share.
//
//   y[m, r] = sum_k x[m, k] * w[r, k]      for the 16 rows r of one tile and a few rows m of x
//
// exact   float32 activations, codes decoded exactly; each half chunk (16 in-features) is summed, then scaled.
// a8      activations in int8 with a scale for each 32 in-features, int32 dot products, scaled in float32.
// a16     the same in int16.
//
// Each family has two paths with the same arithmetic in the same order, so that a row's bits don't depend on how many
// rows are next to it. Few rows of x: codes are decoded as they are read, once for all rows of the pass (direct). Many:
// a stretch of a tile is decoded once into a panel, which all rows then use.
#pragma once

#include <cstdint>

#include "layout.hpp"

namespace q4 {

// Rows of x of one pass, chunk by chunk, rows side by side, so that one pointer walks through them.
struct Activations {
    const float* values;   // exact: [chunks][rows][32]
    const int8_t* levels;  // a8:    [chunks][rows][32]; a16: of int16, see a16.hpp
    const float* scale;    // both:  [chunks][rows]
    const int32_t* start;  // both:  [chunks][rows][2], -center * the sum of a half chunk's levels
    const float* side;     // both:  [chunks][rows][2], that sum (ZERO), or that times the scale (OFFSET)
    // Where a chunk has one scale, start[0] and side[0] stand for both halves.
};

// Of 32 magnitudes, more than this many that reach a sixteenth of the largest are no outliers: see outliers.hpp.
constexpr int32_t kSixteenth = 4 << 23;  // of a float's bits
constexpr int kMostLarge = 6;

// Bits of 2^90: products of larger numbers might pass float32's end before they are scaled. Rows with such are computed
// exactly, divided by a power of two and multiplied by it at the end.
constexpr int32_t kHuge = 217 << 23;

struct Tile {
    const q4_matrix& matrix;
    const Layout& at;
    const uint8_t* data;
};

// A number of x that is multiplied exactly, in addition to the rounded ones; see outliers.hpp.
struct Outlier : Place {
    float value;
    int32_t column;
};

// Columns that outliers of several rows of x meet, which are mostly the same: decoded once for each tile.
struct Columns {
    static constexpr int kPlaces = 2048, kMost = 512;  // a column that finds no room is decoded for each outlier
    alignas(64) double weights[kMost][kTileRows];
    Outlier which[kMost];
    int32_t count;
    int16_t index[kPlaces];  // by the column's last bits

    [[gnu::always_inline]] void clear() {
        count = 0;
        std::fill_n(index, kPlaces, int16_t{-1});
    }
    [[gnu::always_inline]] void add(const Outlier& outlier) {
        int16_t& place = index[outlier.column % kPlaces];
        if (place >= 0 || count == kMost) return;
        which[count] = outlier;
        place = static_cast<int16_t>(count++);
    }
    // NULL where the column is not here.
    [[gnu::always_inline]] const double* find(int32_t column) const {
        const int16_t place = index[column % kPlaces];
        return place >= 0 && which[place].column == column ? weights[place] : nullptr;
    }
};

// A decoded stretch of a tile: a weight is 1 byte (a8), 2 (a16) or 4 (exact), so it holds 32 chunks, 16 or 8.
constexpr int64_t kPanelBytes = 16384;
constexpr int64_t kExactPanelChunks = kPanelBytes / (kTileRows * kChunk * 4);
constexpr int64_t kA8PanelChunks = kPanelBytes / (kTileRows * kChunk);
constexpr int64_t kA16PanelChunks = kPanelBytes / (kTileRows * kChunk * 2);
struct Panel {
    alignas(64) uint8_t codes[kPanelBytes];  // a8, a16: levels as lines of 64 bytes; exact: float [k][16]
    alignas(64) float scale[kA8PanelChunks * 2 * kTileRows];   // [chunk][set][16]
    alignas(64) float second[kA8PanelChunks * 2 * kTileRows];  // a8, a16; exact weights hold it already
    Columns columns;  // those of the tile that outliers meet
};

struct Spike : Place {
    float keep;  // 0 for the first spike of a half chunk, which its sum begins with; else 1
    float ends;  // 1 for the last one, after which the sum is scaled; else 0
};

using ChunkOrder = void (*)(int8_t* levels);
using ColumnDecoder = void (*)(const Tile&, Columns&);
// With columns that a decoder has written, or without; y: [16], written.
using OutlierKernel = void (*)(const Tile&, const Outlier* outliers, int64_t count, const Columns*, double* y);
using SpikeKernel = void (*)(const Tile&, const Spike* spikes, int64_t count, float* y);  // y: [16], written
using DirectKernel = void (*)(const Tile&, const Activations&, float* y);  // y: [rows][16], written
using PanelDecoder = void (*)(const Tile&, int64_t first, int64_t last, Panel&);
using PanelKernel = void (*)(const Panel&, const Activations&, int64_t chunks, float* y);  // y: [rows][16], added to

// Results of one tile for some rows of x on their way to y; the pointers are at the tile's first row.
struct Finish {
    static constexpr int kMost = 64;  // rows of x
    float step;
    float growth;                    // what shrunk rows of x were divided by
    uint64_t shrunk, with_outliers;  // which rows are, as bits
    const double* outliers;          // their sums: [rows][16]
    const float* global;             // NULL, one, or one per row of the tile
    bool is_global_per_row, divides;
    const void* bias;
    void* y;
    const int64_t* index;  // which rows of y: [rows]; NULL for the first ones
    int64_t y_bytes;       // of a row
    int32_t type;
    int64_t count;  // rows of the tile that exist

    [[gnu::always_inline]] uint8_t* row(int r) const { return static_cast<uint8_t*>(y) + (index ? index[r] : r) * y_bytes; }
};

constexpr int64_t kTileKeys = 32;  // keys or values that stay near for all queries

// Keys or values of one head.
struct Cache {
    const uint8_t* data;
    int64_t stride;  // bytes
    int32_t type;
};

// Some queries to one head of keys and values: softmax(scale · query · keysᵀ) · values, each over keys of its own, block by block.
// A state is what some blocks of a query's keys give: the largest score, the sum of exp(score - largest), and from kHead on the
// values times these weights, [padded(columns)].
struct Attention {
    static constexpr int kMost = 48;
    static constexpr int64_t kBlock = 256, kHead = 16;
    static constexpr int64_t kApart = 64;  // the first keys of two queries, at most
    static constexpr int64_t kRoom = kBlock + kApart + 48;  // of the scores of a query, written by whole tiles
    struct One {
        const float* query;
        float* state;        // written
        int64_t first, end;  // its keys
    };
    struct Scratch {
        float* scores;      // [queries, kRoom]
        float* states;      // [queries, state_size]
        float* queries;     // [queries, padded]
        float *tile, *transposed;  // [kTileKeys, padded]
    };
    int count = 0;
    One each[kMost];
    Cache keys, values;
    int64_t columns, from, to;  // blocks
    float scale;
    Scratch scratch;

    static int64_t padded(int64_t columns) { return ceil_div(columns, 16) * 16; }
    static int64_t state_size(int64_t columns) { return kHead + padded(columns); }
    static int64_t blocks(int64_t keys) { return ceil_div(keys, kBlock); }
};

// A vector of an operation of spiking networks: one number, or one for each column.
struct Vector {
    const float* data;
    bool is_one;
    [[gnu::always_inline]] Vector from(int64_t column) const { return {is_one ? data : data + column, is_one}; }
};

// Up to 64 neurons.
struct Firing {
    float* mem;
    Vector threshold, vector;
    float* count;  // NULL without a refractory time
    const float* before;
    Vector steps;
    int32_t reset;  // 0: none, 1: subtract, 2: set
    bool is_inclusive;
    int64_t columns;
};

// Entries of synapses, from one on that lies on `target` by its gap.
struct Sending {
    const q4_synapses& synapses;
    float* ring;
    const int64_t* slots;  // [256], the place of a delay's slot in the ring
};

// What programs compute besides products; a result does not depend on what is computed next to it.
struct Operations {
    float (*dot)(const float* a, const float* b, int64_t count);
    // y[from … to) of a norm of x[count]; shift is added to the weight.
    void (*rms_norm)(const float* x, const float* weight, float eps, float shift, int64_t count, int64_t from, int64_t to, float* y);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t count, int64_t from, int64_t to,
                       float* y);
    void (*activate)(int32_t op, const float* x, float* y, int64_t count);
    void (*combine)(bool is_sum, const float* a, const float* b, float* y, int64_t count);
    void (*affine)(const float* x, float factor, float addend, float* y, int64_t count);
    void (*softmax)(const float* x, float* y, int64_t count);
    void (*attend)(const Attention&);
    // Join the state of a query's next block to that of those before; y = the values of a state, divided by its sum.
    void (*join)(const float* next, float* state, int64_t columns);
    void (*conclude)(const float* state, int64_t columns, float* y);
    // The k largest, falling, equals by column, NaN above all; `values` may be NULL where k is 1.
    void (*largest)(const float* x, int64_t count, int64_t k, float* values, int64_t* columns);
    // x = beta · x + gain · i + leak, each rounded; `gain` and `leak` may have no data.
    void (*integrate)(float* x, const float* i, const Vector& beta, const Vector& gain, const Vector& leak, int64_t count);
    uint64_t (*fire)(const Firing&);
    // A row of a cache: as it is, in float16, or in levels with their scale behind them.
    void (*keep)(const float* x, int64_t count, int32_t type, uint8_t* row);
    void (*send)(const Sending&, int64_t from, int64_t to, int64_t target);
};

// Where a row's levels and what belongs to them go, of its chunks `rows` places apart.
struct Quantized {
    int8_t* levels;
    float* scale;
    int32_t* start;
    float* side;
    int64_t rows;
    int32_t center;
    bool has_halves, is_scaled;  // a number for each half; times the scale
};

struct Kernels {
    DirectKernel (*direct)(const q4_matrix&, int32_t family, int rows);  // rows: a power of two up to direct_rows
    PanelDecoder (*decoder)(const q4_matrix&, int32_t family);
    PanelKernel (*panel)(const q4_matrix&, int32_t family, int rows);  // rows: panel_rows, or as above
    int direct_rows;
    int64_t panel_from[3];  // rows of x from which a family's panels pay
    int panel_rows[3];      // of each family
    bool is_wide_signed;  // levels above 24 (and bytes) are multiplied as signed numbers, without a centre
    // 32 numbers to float32: returns the bits of the largest magnitude among them; `large` of them reach a sixteenth of it.
    int32_t (*widen)(const uint8_t* from, int32_t type, float* to, int32_t* large);
    // Quantise 32 in-features of one row: returns the scale; levels, and the sums of both halves' levels.
    float (*quantize)(const float* x, int32_t most, int8_t* levels, int32_t* sums);
    // The same to int16, of which `peak` is the largest.
    float (*quantize_words)(const float* x, int32_t most, float peak, int8_t* levels, int32_t* sums);
    void (*finish)(const Finish&, const float* sums, int rows);  // sums: [rows][16]
    // NULL, or what puts the levels of a chunk, of an even number of rows, in the order that the kernels want.
    void (*pair_rows)(int8_t* levels, int rows) = nullptr;
    const Operations* operations = nullptr;
    SpikeKernel (*spikes)(const q4_matrix&) = nullptr;
    uint32_t (*find_outliers)(const float* x) = nullptr;  // which of 32 numbers they are, as bits
    OutlierKernel (*outliers)(const q4_matrix&) = nullptr;
    ColumnDecoder (*columns)(const q4_matrix&) = nullptr;
    // NULL, or what puts a chunk of int16 levels, of the only row of a direct pass, in its kernel's order.
    ChunkOrder (*single_order)(const q4_matrix&) = nullptr;
    // NULL, or what quantises chunks of a row of float32 to int8, up to the first one that may have outliers or that integers
    // can't hold: returns how many.
    int64_t (*quantize_run)(const float* x, int64_t chunks, const Quantized& to) = nullptr;
};

// Those of an instruction set that was compiled in, or NULL; see isa.cpp.
const Kernels* kernels_of(int32_t isa);
const Kernels& kernels_avx2();
const Kernels& kernels_avxvnni();
const Kernels& kernels_avx512();
const Kernels& kernels_neon_dotprod();
const Kernels& kernels_neon_i8mm();

}  // namespace q4
