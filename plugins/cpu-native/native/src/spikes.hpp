// y[r] = sum of w[r, k] over the spiking k, for the 16 rows r of one tile: lines without a spike are not read.
//
// Each addition is that of the exact kernel for x[k] = 1, in its order: a half chunk is summed, then scaled. Where x is 0, that
// kernel adds 0, so that both give the same bits. A spike costs a line of codes (64 bytes, or 16 of 8 bits) and its scales
// instead of a chunk's share of both; the numbers that say where a half chunk begins and ends spare a jump that can't be foretold.
#pragma once

#include "exact.hpp"

namespace q4 {

// Rare spikes wait for lines that nothing else foretells, so lines are asked for tiles ahead, this many spikes before their turn:
// 20 of 2,048 took 15 us instead of 36 from a cold cache. 1 tile ahead gained less, 128 spikes the same. Above one in 16 columns
// the processor foretells them itself, and asking cost up to a quarter.
constexpr int64_t kSpikesAhead = 64, kRare = 16;

template <class V, int Second, int Bits> void spikes_direct(const Tile& t, const Spike* spikes, int64_t count, float* y) {
    constexpr int kParts = kTileRows / V::kLanes;
    using F = typename V::Floats;
    const typename V::Codebook book(t.matrix.codebook);
    const F base = V::splat(byte_base(t.matrix));
    const auto bytes = V::splat_bytes(short_base(t.matrix));
    F sum[kParts], partial[kParts];
    for (int part = 0; part < kParts; ++part) sum[part] = partial[part] = V::zero();
    const bool is_rare = count * kRare < t.at.chunks * kChunk;
    const uint8_t* ahead = t.data + std::max<int64_t>(1, kSpikesAhead / std::max<int64_t>(1, count)) * t.at.tile_bytes;
    for (const Spike* spike = spikes; spike < spikes + count; ++spike) {
        if (is_rare) {
            __builtin_prefetch(ahead + spike->head);
            __builtin_prefetch(ahead + spike->codes);
        }
        const Numbers<V, Second, kAnyType> of{t.matrix, t.at, t.data + spike->head, t.data + spike->super};
        const F keep = V::splat(spike->keep), ends = V::splat(spike->ends);
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
            const F s = of.scale(spike->set, part), z = of.second(spike->set, part);
            const F value = column_values<V, Bits>(t.data + spike->codes, *spike, part, book, bytes);
            partial[part] = V::fma(keep, partial[part], with_second<V, Second, Bits != 4>(value, s, z, base));
            sum[part] = V::fma(Second == Q4_OFFSET ? ends : V::mul(s, ends), partial[part], sum[part]);
        }
    }
    for (int part = 0; part < kParts; ++part) V::store(y + part * V::kLanes, sum[part]);
}

}  // namespace q4
