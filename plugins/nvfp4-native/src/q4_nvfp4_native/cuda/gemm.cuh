// y[M, N] = rows[m] · global[n] · Σ_k a[m, k] b[n, k] + bias[n], both operands E2M1 under block scales.
//
// Operands (all row-major, K padded to a multiple of 128 with zero codes):
//   a_codes [M, K / 2], b_codes [N, K / 2]    two codes a byte, the lower nibble first; 16-byte aligned
//   a_scales [M, K / B], b_scales [N, K / B]  bytes; B = 16 (E4M3) or 32 (E8M0); 8-byte aligned
//   a_rows [M] float32; b_global [1] or [N] float32, or null for 1
// A block of threads computes BM by BN elements. Tiles of K travel through shared memory in a ring of STAGES stages; each
// stage holds 128 in-features for each of the WK groups of warps that split K among themselves. Codes lie there in rows
// of 64 bytes, the 16-byte chunks of a row in an order that depends on the row, so that neither the copies nor the loads
// of fragments meet on a bank. Sums are float32; the groups of warps are added in a fixed order, so equal calls give
// equal bits.
//
// Bound: M small: the bytes of b; M large: the rate of mma. Neither was measured yet.
#pragma once

#include "device.cuh"

enum Q4Type { Q4_FLOAT32 = 0, Q4_BFLOAT16 = 1, Q4_FLOAT16 = 2 };

struct Q4Gemm {
    const uint8* a_codes;
    const uint8* a_scales;
    const float* a_rows;
    const uint8* b_codes;
    const uint8* b_scales;
    const float* b_global;
    const void* bias;
    void* out;
    int m;
    int n;
    int k;
    int global_step;     // 0: one global scale for all rows of b; 1: one for each
    int global_divides;  // 1: the global scale divides
    int out_type;        // Q4Type of out and bias
};

template <int bm, int bn, int wm, int wn, int wk, int stages, typename Scale>
struct Tile {
    static constexpr int BM = bm, BN = bn, WM = wm, WN = wn, WK = wk, STAGES = stages;
    static constexpr int THREADS = 32 * WM * WN * WK;
    static constexpr int DEPTH = 128;                         // in-features of a stage for one group of warps
    static constexpr int CODE_BYTES = DEPTH / 2;              // of a row of a stage
    static constexpr int SCALE_BYTES = DEPTH / Scale::block;  // of a row of a stage
    static constexpr int A_CODES = WK * BM * CODE_BYTES, B_CODES = WK * BN * CODE_BYTES;
    static constexpr int A_SCALES = WK * BM * SCALE_BYTES, B_SCALES = WK * BN * SCALE_BYTES;
    static constexpr int STAGE_BYTES = A_CODES + B_CODES + A_SCALES + B_SCALES;
    static constexpr int TM = BM / WM, TN = BN / WN;  // of a warp
    static constexpr int SHARES_BYTES = (WK - 1) * BM * BN * 4;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES > SHARES_BYTES ? STAGES * STAGE_BYTES : SHARES_BYTES;
    static_assert(TM % 16 == 0 && TN % 16 == 0, "a warp computes whole fragments, two of them along N at a time");
    static_assert(STAGES >= 2, "copies run ahead of the products");
    static_assert(SHARED_BYTES <= 101376, "what a block of threads may have on sm_120 and sm_121");
};

constexpr int kChunk = 16;  // bytes that one thread copies, and a row of a matrix for load_matrices

// Where chunk 0 … 3 of a row of codes lies in its tile.
Q4_DEVICE int chunk_place(int row, int chunk) { return row * 64 + ((chunk ^ ((row >> 1) & 3)) * kChunk); }

// The tile of a block of threads: blocks that run at the same time share rows of both operands.
Q4_DEVICE void tile_of(int index, int tiles_m, int tiles_n, int& tile_m, int& tile_n) {
    constexpr int group_rows = 8;
    const int in_group = group_rows * tiles_n;
    const int first = index / in_group * group_rows;
    const int rows = tiles_m - first < group_rows ? tiles_m - first : group_rows;
    tile_m = first + index % in_group % rows;
    tile_n = index % in_group / rows;
}

template <typename T, int rows>
Q4_DEVICE void copy_operand(uint8* codes, uint8* scales, const uint8* from_codes, const uint8* from_scales, int first,
                            int total, int k, int depth) {
    const int64 code_row = k / 2, scale_row = k / T::DEPTH * T::SCALE_BYTES;
    constexpr int chunks = T::CODE_BYTES / kChunk;
    Q4_UNROLL
    for (int item = thread_index(); item < T::WK * rows * chunks; item += T::THREADS) {
        const int chunk = item % chunks, group = item / chunks % T::WK, row = item / (chunks * T::WK);
        const int start = depth + group * T::DEPTH;
        const bool is_inside = first + row < total && start < k;
        const uint8* from = from_codes + (is_inside ? (first + row) * code_row + start / 2 + chunk * kChunk : 0);
        copy_async<kChunk>(codes + group * rows * T::CODE_BYTES + chunk_place(row, chunk), from, is_inside);
    }
    Q4_UNROLL
    for (int item = thread_index(); item < T::WK * rows; item += T::THREADS) {
        const int group = item % T::WK, row = item / T::WK;
        const int start = depth + group * T::DEPTH;
        const bool is_inside = first + row < total && start < k;
        const int64 place = (first + row) * scale_row + start / T::DEPTH * T::SCALE_BYTES;
        copy_async<T::SCALE_BYTES>(scales + (group * rows + row) * T::SCALE_BYTES,
                                   from_scales + (is_inside ? place : 0), is_inside);
    }
}

template <typename T>
Q4_DEVICE void copy_stage(uint8* stage, const Q4Gemm& call, int first_m, int first_n, int depth) {
    uint8* b_codes = stage + T::A_CODES;
    uint8* a_scales = b_codes + T::B_CODES;
    uint8* b_scales = a_scales + T::A_SCALES;
    copy_operand<T, T::BM>(stage, a_scales, call.a_codes, call.a_scales, first_m, call.m, call.k, depth);
    copy_operand<T, T::BN>(b_codes, b_scales, call.b_codes, call.b_scales, first_n, call.n, call.k, depth);
}

// The scale bytes of 64 in-features of a row: the half of a stage that `step` names, in the low bytes.
template <typename T>
Q4_DEVICE uint32 scales_of(const uint8* row, int step) {
    if constexpr (T::SCALE_BYTES == 8) return *reinterpret_cast<const uint32*>(row + 4 * step);
    return *reinterpret_cast<const uint32*>(row) >> (16 * step);
}

template <typename T, typename Scale>
Q4_DEVICE void multiply_stage(float (&sums)[T::TM / 16][T::TN / 8][4], const uint8* stage, int warp_m, int warp_n,
                              int warp_k, int lane) {
    const uint8* a_codes = stage + warp_k * T::BM * T::CODE_BYTES;
    const uint8* b_codes = stage + T::A_CODES + warp_k * T::BN * T::CODE_BYTES;
    const uint8* a_scales = stage + T::A_CODES + T::B_CODES + warp_k * T::BM * T::SCALE_BYTES;
    const uint8* b_scales = stage + T::A_CODES + T::B_CODES + T::A_SCALES + warp_k * T::BN * T::SCALE_BYTES;
    const int matrix = lane / 8, matrix_row = lane % 8;
    Q4_UNROLL
    for (int step = 0; step < T::DEPTH / 64; ++step) {
        uint32 a[T::TM / 16][4], a_scale[T::TM / 16];
        uint32 b[T::TN / 8][2], b_scale[T::TN / 8];
        Q4_UNROLL
        for (int i = 0; i < T::TM / 16; ++i) {
            const int first = warp_m * T::TM + i * 16;
            const int row = first + matrix % 2 * 8 + matrix_row;
            load_matrices(a[i], a_codes + chunk_place(row, 2 * step + matrix / 2));
            a_scale[i] = scales_of<T>(a_scales + (first + lane % 2 * 8 + lane / 4) * T::SCALE_BYTES, step);
        }
        Q4_UNROLL
        for (int j = 0; j < T::TN / 16; ++j) {
            const int first = warp_n * T::TN + j * 16;
            const int row = first + matrix / 2 * 8 + matrix_row;
            uint32 both[4];
            load_matrices(both, b_codes + chunk_place(row, 2 * step + matrix % 2));
            b[2 * j][0] = both[0];
            b[2 * j][1] = both[1];
            b[2 * j + 1][0] = both[2];
            b[2 * j + 1][1] = both[3];
            b_scale[2 * j] = scales_of<T>(b_scales + (first + lane / 4) * T::SCALE_BYTES, step);
            b_scale[2 * j + 1] = scales_of<T>(b_scales + (first + 8 + lane / 4) * T::SCALE_BYTES, step);
        }
        Q4_UNROLL
        for (int i = 0; i < T::TM / 16; ++i) {
            Q4_UNROLL
            for (int j = 0; j < T::TN / 8; ++j) Scale::multiply(sums[i][j], a[i], b[j], a_scale[i], b_scale[j]);
        }
    }
}

// Adds the sums of the groups of warps to those of group 0, in the order of the groups.
template <typename T>
Q4_DEVICE void add_groups(float (&sums)[T::TM / 16][T::TN / 8][4], float* shares, int warp, int lane) {
    constexpr int warps = T::WM * T::WN, count = T::TM / 16 * (T::TN / 8) * 4;
    synchronize();  // nobody reads tiles there any more
    const int group = warp / warps;
    if (group > 0) {
        float* mine = shares + ((group - 1) * warps + warp % warps) * count * 32 + lane;
        Q4_UNROLL
        for (int i = 0; i < count; ++i) mine[i * 32] = sums[i / (T::TN / 8 * 4)][i / 4 % (T::TN / 8)][i % 4];
    }
    synchronize();
    if (group > 0) return;
    for (int other = 0; other < T::WK - 1; ++other) {
        const float* theirs = shares + (other * warps + warp) * count * 32 + lane;
        Q4_UNROLL
        for (int i = 0; i < count; ++i) sums[i / (T::TN / 8 * 4)][i / 4 % (T::TN / 8)][i % 4] += theirs[i * 32];
    }
}

Q4_DEVICE float load_number(const void* from, int64 index, int type) {
    if (type == Q4_FLOAT32) return static_cast<const float*>(from)[index];
    const uint16 bits = static_cast<const uint16*>(from)[index];
    return type == Q4_BFLOAT16 ? float_of(static_cast<uint32>(bits) << 16) : from_half(bits);
}

// Stores columns `column` and `column + 1` of a row of y, as one piece where the address allows.
Q4_DEVICE void store_pair(const Q4Gemm& call, int row, int column, float first, float second) {
    const int64 index = static_cast<int64>(row) * call.n + column;
    const bool has_second = column + 1 < call.n;
    if (call.out_type == Q4_FLOAT32) {
        float* out = static_cast<float*>(call.out) + index;
        out[0] = first;
        if (has_second) out[1] = second;
        return;
    }
    const bool is_bfloat16 = call.out_type == Q4_BFLOAT16;
    uint16* out = static_cast<uint16*>(call.out) + index;
    const uint16 low = is_bfloat16 ? to_bfloat16(first) : to_half(first);
    const uint16 high = is_bfloat16 ? to_bfloat16(second) : to_half(second);
    if (has_second && (reinterpret_cast<unsigned long long>(out) & 3) == 0) {
        *reinterpret_cast<uint32*>(out) = low | static_cast<uint32>(high) << 16;
        return;
    }
    out[0] = low;
    if (has_second) out[1] = high;
}

template <typename T>
Q4_DEVICE void store_tile(const float (&sums)[T::TM / 16][T::TN / 8][4], const Q4Gemm& call, int first_m, int first_n,
                          int lane) {
    Q4_UNROLL
    for (int j = 0; j < T::TN / 8; ++j) {
        const int column = first_n + j * 8 + lane % 4 * 2;
        if (column >= call.n) continue;
        float factor[2], added[2];
        Q4_UNROLL
        for (int side = 0; side < 2; ++side) {
            const bool is_inside = column + side < call.n;
            factor[side] = 1.0f;
            added[side] = 0.0f;
            if (is_inside && call.b_global != nullptr) {
                const float global = call.b_global[(column + side) * call.global_step];
                factor[side] = call.global_divides ? reciprocal(global) : global;
            }
            if (is_inside && call.bias != nullptr) added[side] = load_number(call.bias, column + side, call.out_type);
        }
        Q4_UNROLL
        for (int i = 0; i < T::TM / 16; ++i) {
            Q4_UNROLL
            for (int half = 0; half < 2; ++half) {
                const int row = first_m + i * 16 + half * 8 + lane / 4;
                if (row >= call.m) continue;
                float y[2];
                Q4_UNROLL
                for (int side = 0; side < 2; ++side) {
                    y[side] = sums[i][j][half * 2 + side] * factor[side] * call.a_rows[row] + added[side];
                }
                store_pair(call, row, column, y[0], y[1]);
            }
        }
    }
}

template <typename T, typename Scale>
Q4_DEVICE void multiply_tile(const Q4Gemm& call) {
    uint8* shared = shared_bytes();
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    const int warp_k = warp / (T::WM * T::WN), warp_m = warp / T::WN % T::WM, warp_n = warp % T::WN;
    int tile_m, tile_n;
    tile_of(block_index(), (call.m + T::BM - 1) / T::BM, (call.n + T::BN - 1) / T::BN, tile_m, tile_n);
    const int first_m = tile_m * T::BM, first_n = tile_n * T::BN;
    constexpr int span = T::WK * T::DEPTH;
    const int steps = (call.k + span - 1) / span;
    float sums[T::TM / 16][T::TN / 8][4] = {};
    for (int stage = 0; stage < T::STAGES - 1; ++stage) {
        if (stage < steps) copy_stage<T>(shared + stage * T::STAGE_BYTES, call, first_m, first_n, stage * span);
        commit_copies();  // an empty group counts as well, so that the waiting below is the same at every step
    }
    for (int step = 0; step < steps; ++step) {
        wait_for_copies<T::STAGES - 2>();
        synchronize();  // everybody's copies of this step are there, and nobody reads the stage that is filled next
        const int ahead = step + T::STAGES - 1;
        if (ahead < steps)
            copy_stage<T>(shared + ahead % T::STAGES * T::STAGE_BYTES, call, first_m, first_n, ahead * span);
        commit_copies();
        multiply_stage<T, Scale>(sums, shared + step % T::STAGES * T::STAGE_BYTES, warp_m, warp_n, warp_k, lane);
    }
    wait_for_copies<0>();
    if constexpr (T::WK > 1) {
        add_groups<T>(sums, reinterpret_cast<float*>(shared), warp, lane);
        if (warp_k > 0) return;
    }
    store_tile<T>(sums, call, first_m + warp_m * T::TM, first_n + warp_n * T::TN, lane);
}
