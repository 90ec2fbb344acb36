// `bad`: arguments that make no sense are refused with -1, lack of memory is reported with -2, and nothing is written; a call
// like the one before it wants none.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>
#include <thread>

#include "commands.hpp"

namespace {
std::atomic<bool> t_has_no_memory{false};
}

void* operator new(size_t bytes) {
    void* memory = t_has_no_memory ? nullptr : std::malloc(std::max<size_t>(bytes, 1));
    if (!memory) throw std::bad_alloc();
    return memory;
}
void* operator new(size_t bytes, std::align_val_t align) {  // a panel's
    const auto step = static_cast<size_t>(align);
    void* memory = t_has_no_memory ? nullptr : std::aligned_alloc(step, (std::max<size_t>(bytes, 1) + step - 1) / step * step);
    if (!memory) throw std::bad_alloc();
    return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace q4test {
namespace {

constexpr int64_t kRows = 20, kColumns = 70, kBlocks = 3;

// A sound call of everything, each part of which can be spoilt.
struct Everything {
    q4_matrix matrix{};
    q4_source source{};
    q4_call call{};
    const q4_matrix* the_matrix = &matrix;
    const q4_source* the_source = &source;
    const q4_call* the_call = &call;
    uint8_t* packed;
    const uint8_t* unpacked;
    uint8_t *codes, *scale, *second;
    const int64_t* rows = nullptr;
    int64_t count = kRows;
    int32_t threads = 2, isa;

    std::vector<uint8_t> code_bytes, tiles, out_codes, out_scale, out_second;
    std::vector<float> numbers, seconds, x, y, global, bias;
    std::vector<int64_t> chosen{0, kRows - 1, 5};

    explicit Everything(int32_t which)
        : isa(which), code_bytes(kRows * 35, 0x53), tiles(1 << 15), out_codes(kRows * kColumns), out_scale(kRows * kBlocks * 4),
          out_second(kRows * kBlocks * 4), numbers(kRows * kBlocks, 0.5f), seconds(kRows * kBlocks, 0.25f), x(2 * kColumns, 1.0f),
          y(2 * kRows, -7.0f), global(kRows, 2.0f), bias(kRows, 1.0f) {
        matrix.rows = kRows, matrix.columns = kColumns, matrix.block = 32, matrix.bits = matrix.held_bits = 4;
        matrix.scale_type = Q4_F32, matrix.second = Q4_OFFSET, matrix.second_type = Q4_F32, matrix.step = 1.0f;
        for (int q = 0; q < 16; ++q) matrix.codebook[q] = static_cast<float>(q), matrix.level[q] = static_cast<uint8_t>(q);
        source = {code_bytes.data(), 35, 35, 1, 35, Q4_LOW_FIRST, 0, reinterpret_cast<uint8_t*>(numbers.data()), kBlocks * 4, 4,
                  reinterpret_cast<uint8_t*>(seconds.data()), kBlocks * 4, 4, nullptr, nullptr, 0, 0};
        packed = tiles.data(), unpacked = tiles.data();
        codes = out_codes.data(), scale = out_scale.data(), second = out_second.data();
        call.tiles = tiles.data(), call.global_scale = global.data(), call.global_count = kRows;
        call.x = x.data(), call.x_rows = 2, call.x_stride = kColumns, call.y = y.data(), call.y_stride = kRows;
        call.bias = bias.data(), call.family = Q4_A8, call.threads = 2;
    }

    void super_blocks(int64_t count) {
        matrix.super_blocks = count, matrix.scale_type = matrix.second_type = Q4_U8;
    }
    int32_t measure() const { return q4_cpu_prepared_bytes(the_matrix) < 0 ? -1 : 0; }
    int32_t pack() const { return q4_cpu_pack(the_matrix, the_source, packed, threads); }
    int32_t unpack() const { return q4_cpu_unpack(the_matrix, unpacked, rows, count, codes, scale, second, threads); }
    int32_t linear() const { return q4_cpu_linear(the_matrix, the_call, isa); }
};

enum Function { MEASURE = 1, PACK = 2, UNPACK = 4, LINEAR = 8, ALL = 15 };

struct Spoilt {
    const char* what;
    int functions;  // that must refuse it
    std::function<void(Everything&)> spoil;
};

const Spoilt kSpoilt[] = {
    {"no matrix", ALL, [](Everything& e) { e.the_matrix = nullptr; }},
    {"no rows", ALL, [](Everything& e) { e.matrix.rows = 0; }},
    {"negative rows", ALL, [](Everything& e) { e.matrix.rows = -16; }},
    {"more rows than any memory", ALL, [](Everything& e) { e.matrix.rows = int64_t{1} << 62; }},
    {"no columns", ALL, [](Everything& e) { e.matrix.columns = 0; }},
    {"negative columns", ALL, [](Everything& e) { e.matrix.columns = -1; }},
    {"more columns than any memory", ALL, [](Everything& e) { e.matrix.columns = std::numeric_limits<int64_t>::max(); }},
    {"block 0", ALL, [](Everything& e) { e.matrix.block = 0; }},
    {"block 24", ALL, [](Everything& e) { e.matrix.block = 24; }},
    {"block -32", ALL, [](Everything& e) { e.matrix.block = -32; }},
    {"a huge block", ALL, [](Everything& e) { e.matrix.block = int64_t{1} << 62; }},
    {"5 bits", ALL, [](Everything& e) { e.matrix.bits = e.matrix.held_bits = 5; }},
    {"5 bits held of 4", ALL, [](Everything& e) { e.matrix.held_bits = 5; }},
    {"no bits held", ALL, [](Everything& e) { e.matrix.held_bits = 0; }},
    {"4 bits held of 8", ALL, [](Everything& e) { e.matrix.bits = 8, e.source.order = Q4_BYTES; }},
    {"a first level where all are held", ALL, [](Everything& e) { e.matrix.first = 1; }},
    {"a first level below 0", ALL, [](Everything& e) { e.matrix.held_bits = 3, e.matrix.first = -1; }},
    {"held levels beyond the last one", ALL, [](Everything& e) { e.matrix.held_bits = 3, e.matrix.first = 9; }},
    {"held bits with a zero", ALL, [](Everything& e) { e.matrix.held_bits = 3, e.matrix.second = Q4_ZERO; }},
    {"held bits of codes that are not their own levels", ALL,
     [](Everything& e) { e.matrix.held_bits = 3, e.matrix.second = Q4_NONE, e.matrix.level[3] = 4; }},
    {"held bits of codes that are not their own values", ALL,
     [](Everything& e) { e.matrix.held_bits = 3, e.matrix.second = Q4_NONE, e.matrix.codebook[3] = 4; }},
    {"half a byte for a scale", ALL, [](Everything& e) { e.super_blocks(3), e.matrix.scale_type = Q4_LOW_U4; }},
    {"half a byte for an offset", ALL, [](Everything& e) { e.super_blocks(3), e.matrix.second_type = Q4_HIGH_U4; }},
    {"halves of bytes without super-blocks", ALL, [](Everything& e) { e.matrix.scale_type = Q4_LOW_U4, e.matrix.second_type = Q4_HIGH_U4; }},
    {"halves of bytes the wrong way", ALL,
     [](Everything& e) { e.super_blocks(3), e.matrix.scale_type = Q4_HIGH_U4, e.matrix.second_type = Q4_LOW_U4; }},
    {"scale type -1", ALL, [](Everything& e) { e.matrix.scale_type = -1; }},
    {"scale type 8", ALL, [](Everything& e) { e.matrix.scale_type = Q4_I32 + 1; }},
    {"second 3", ALL, [](Everything& e) { e.matrix.second = Q4_ZERO + 1; }},
    {"second type 8", ALL, [](Everything& e) { e.matrix.second_type = Q4_I32 + 1; }},
    {"a zero for codes that are not their own levels", ALL, [](Everything& e) { e.matrix.second = Q4_ZERO, e.matrix.level[3] = 4; }},
    {"a zero for codes that are not their own values", ALL, [](Everything& e) { e.matrix.second = Q4_ZERO, e.matrix.codebook[3] = 4; }},
    {"8 bits with a center and nothing to add", ALL, [](Everything& e) { e.matrix.second = Q4_NONE, e.matrix.bits = e.matrix.held_bits = 8, e.source.order = Q4_BYTES; }},
    {"8 bits with a center between levels", ALL, [](Everything& e) { e.matrix.center = 0.5f, e.matrix.bits = e.matrix.held_bits = 8, e.source.order = Q4_BYTES; }},
    {"unsigned nibbles", ALL, [](Everything& e) { e.matrix.is_unsigned = 1; }},
    {"bytes that are 2 of unsigned", ALL, [](Everything& e) { e.matrix.is_unsigned = 2, e.matrix.bits = e.matrix.held_bits = 8, e.source.order = Q4_BYTES; }},
    {"super-blocks that don't divide a row", ALL, [](Everything& e) { e.super_blocks(2); }},
    {"negative super-blocks", ALL, [](Everything& e) { e.super_blocks(-1); }},
    {"super-blocks that cut a group", ALL, [](Everything& e) { e.super_blocks(1), e.matrix.block = 16; }},
    {"super-blocks with a zero", ALL, [](Everything& e) { e.super_blocks(3), e.matrix.second = Q4_ZERO; }},
    {"super-blocks of float scales", ALL, [](Everything& e) { e.super_blocks(3), e.matrix.scale_type = Q4_F16; }},
    {"super-blocks of float offsets", ALL, [](Everything& e) { e.super_blocks(3), e.matrix.second_type = Q4_F32; }},
    {"super-blocks of e4m3 scales", ALL, [](Everything& e) { e.super_blocks(3), e.matrix.scale_type = Q4_E4M3; }},
    {"a center between levels", ALL, [](Everything& e) { e.matrix.center = 7.5f; }},
    {"a center beyond levels", ALL, [](Everything& e) { e.matrix.center = 256.0f; }},
    {"a center that is no number", ALL, [](Everything& e) { e.matrix.center = std::numeric_limits<float>::quiet_NaN(); }},
    {"another center for wide levels", ALL, [](Everything& e) { e.matrix.level[15] = 25, e.matrix.level[0] = 1; }},
    {"level 0 among wide ones", ALL, [](Everything& e) { e.matrix.level[15] = 25, e.matrix.center = 128.0f; }},
    {"a word beyond 14 bits", ALL,
     [](Everything& e) { e.matrix.second = Q4_NONE, e.matrix.level[15] = 25, e.matrix.level[0] = 1, e.matrix.center = 128.0f, e.matrix.word[7] = -8192; }},
    {"an offset to values that levels don't stand for", ALL, [](Everything& e) { e.matrix.codebook[3] = 3.5f; }},
    {"an offset with a step", ALL, [](Everything& e) { e.matrix.step = 0.5f; }},
    {"8 bits with a step", ALL, [](Everything& e) { e.matrix.second = Q4_NONE, e.matrix.bits = e.matrix.held_bits = 8, e.matrix.center = 128.0f, e.source.order = Q4_BYTES, e.matrix.step = 0; }},
    {"no source", PACK, [](Everything& e) { e.the_source = nullptr; }},
    {"no tiles to fill", PACK, [](Everything& e) { e.packed = nullptr; }},
    {"no codes", PACK, [](Everything& e) { e.source.codes = nullptr; }},
    {"no scale", PACK, [](Everything& e) { e.source.scale = nullptr; }},
    {"no offset", PACK, [](Everything& e) { e.source.second = nullptr; }},
    {"no numbers of super-blocks", PACK, [](Everything& e) { e.super_blocks(3); }},
    {"groups of no bytes", PACK, [](Everything& e) { e.source.group_bytes = 0; }},
    {"groups of negative bytes", PACK, [](Everything& e) { e.source.group_bytes = -1; }},
    {"order 4", PACK, [](Everything& e) { e.source.order = Q4_BYTES + 1; }},
    {"order -1", PACK, [](Everything& e) { e.source.order = -1; }},
    {"nibbles as bytes", PACK, [](Everything& e) { e.source.order = Q4_BYTES; }},
    {"bytes as nibbles", PACK, [](Everything& e) { e.matrix.bits = e.matrix.held_bits = 8; }},
    {"halves of nothing", PACK, [](Everything& e) { e.source.order = Q4_HALF_SPLIT; }},
    {"negative halves", PACK, [](Everything& e) { e.source.order = Q4_HALF_SPLIT, e.source.half = -16; }},
    {"no threads", PACK | UNPACK, [](Everything& e) { e.threads = 0; }},
    {"no tiles to unpack", UNPACK, [](Everything& e) { e.unpacked = nullptr; }},
    {"a negative count", UNPACK, [](Everything& e) { e.count = -1; }},
    {"more rows than there are", UNPACK, [](Everything& e) { e.count = kRows + 1; }},
    {"a row that is not there", UNPACK, [](Everything& e) { e.rows = e.chosen.data(), e.count = 3, e.chosen[1] = kRows; }},
    {"a negative row", UNPACK, [](Everything& e) { e.rows = e.chosen.data(), e.count = 3, e.chosen[2] = -1; }},
    {"nowhere for codes", UNPACK, [](Everything& e) { e.codes = nullptr; }},
    {"nowhere for scales", UNPACK, [](Everything& e) { e.scale = nullptr; }},
    {"nowhere for offsets", UNPACK, [](Everything& e) { e.second = nullptr; }},
    {"no call", LINEAR, [](Everything& e) { e.the_call = nullptr; }},
    {"no tiles", LINEAR, [](Everything& e) { e.call.tiles = nullptr; }},
    {"no x", LINEAR, [](Everything& e) { e.call.x = nullptr; }},
    {"no y", LINEAR, [](Everything& e) { e.call.y = nullptr; }},
    {"no rows of x", LINEAR, [](Everything& e) { e.call.x_rows = 0; }},
    {"negative rows of x", LINEAR, [](Everything& e) { e.call.x_rows = -3; }},
    {"more rows of x than any memory", LINEAR, [](Everything& e) { e.call.x_rows = std::numeric_limits<int64_t>::max(); }},
    {"x of e4m3", LINEAR, [](Everything& e) { e.call.x_type = Q4_E4M3; }},
    {"x of type -1", LINEAR, [](Everything& e) { e.call.x_type = -1; }},
    {"y of int8", LINEAR, [](Everything& e) { e.call.y_type = Q4_I8; }},
    {"x between elements", LINEAR, [](Everything& e) { e.call.x = reinterpret_cast<const char*>(e.call.x) + 1; }},
    {"y between elements", LINEAR, [](Everything& e) { e.call.y = reinterpret_cast<char*>(e.call.y) + 2; }},
    {"bias between elements", LINEAR, [](Everything& e) { e.call.bias = reinterpret_cast<const char*>(e.call.bias) + 2; }},
    {"global scale between elements", LINEAR,
     [](Everything& e) { e.call.global_scale = reinterpret_cast<const float*>(reinterpret_cast<const char*>(e.call.global_scale) + 1); }},
    {"an order between elements", LINEAR, [](Everything& e) { e.call.inputs.order = reinterpret_cast<const int64_t*>(e.code_bytes.data() + 1); }},
    {"factors of int8", LINEAR, [](Everything& e) { e.call.inputs.factor = e.x.data(), e.call.inputs.factor_type = Q4_I8; }},
    {"factors between elements", LINEAR, [](Everything& e) { e.call.inputs.factor = reinterpret_cast<const char*>(e.x.data()) + 1; }},
    {"rows of y upon one another", LINEAR, [](Everything& e) { e.call.y_stride = 0; }},
    {"rows of y that overlap", LINEAR, [](Everything& e) { e.call.y_stride = kRows - 1; }},
    {"rows of y that overlap backwards", LINEAR, [](Everything& e) { e.call.y_stride = 1 - kRows; }},
    {"two global scales", LINEAR, [](Everything& e) { e.call.global_count = 2; }},
    {"no global scales", LINEAR, [](Everything& e) { e.call.global_count = 0; }},
    {"family 3", LINEAR, [](Everything& e) { e.call.family = Q4_A16 + 1; }},
    {"family -1", LINEAR, [](Everything& e) { e.call.family = -1; }},
    {"a call without threads", LINEAR, [](Everything& e) { e.call.threads = 0; }},
    {"a call with negative threads", LINEAR, [](Everything& e) { e.call.threads = -2; }},
    {"no instruction set", LINEAR, [](Everything& e) { e.isa = Q4_ISA_NONE; }},
    {"instruction set -1", LINEAR, [](Everything& e) { e.isa = -1; }},
    {"instruction set 99", LINEAR, [](Everything& e) { e.isa = 99; }},
};

// What makes sense though it looks odd.
const Spoilt kSound[] = {
    {"everything as it should be", ALL, [](Everything&) {}},
    {"rows that are chosen", UNPACK, [](Everything& e) { e.rows = e.chosen.data(), e.count = 3; }},
    {"no rows to unpack, and nowhere to", UNPACK, [](Everything& e) { e.count = 0, e.codes = e.scale = e.second = nullptr; }},
    {"one scale and code for all rows", PACK, [](Everything& e) { e.source.scale_row = e.source.code_row = 0; }},
    {"rows of x that are one", LINEAR, [](Everything& e) { e.call.x_stride = 0; }},
    {"one row of y without a stride", LINEAR, [](Everything& e) { e.call.x_rows = 1, e.call.y_stride = 0; }},
    {"more threads than tiles", PACK | UNPACK | LINEAR, [](Everything& e) { e.threads = e.call.threads = 1000; }},
    {"a block longer than the row", ALL, [](Everything& e) { e.matrix.block = 4096; }},
    {"no bias and no global scale", LINEAR, [](Everything& e) { e.call.bias = nullptr, e.call.global_scale = nullptr, e.call.global_count = -1; }},
};

template <size_t Count> int judge(const Spoilt (&cases)[Count], int32_t wanted, int32_t isa) {
    int failures = 0;
    for (const Spoilt& item : cases) {
        Everything e(isa);
        e.pack();
        item.spoil(e);
        const std::vector<uint8_t> tiles = e.tiles;
        const std::vector<float> y = e.y;
        const std::pair<int, std::function<int32_t()>> functions[] = {{MEASURE, [&] { return e.measure(); }},
                                                                      {PACK, [&] { return e.pack(); }},
                                                                      {UNPACK, [&] { return e.unpack(); }},
                                                                      {LINEAR, [&] { return e.linear(); }}};
        for (const auto& [function, call] : functions) {
            if (!(item.functions & function)) continue;
            const int32_t status = call();
            if (status != wanted) ++failures, std::printf("bad: %s: function %d returned %d\n", item.what, function, status);
        }
        if (wanted == 0 || (tiles == e.tiles && y == e.y)) continue;
        ++failures;
        std::printf("bad: %s: refused, but something was written\n", item.what);
    }
    return failures;
}

int judge_memory(int32_t isa) {
    int failures = 0;
    Everything e(isa);
    e.pack();
    const auto check = [&](const char* what, const std::function<int32_t()>& call) {
        int32_t status = 0;
        t_has_no_memory = true;
        status = call();
        t_has_no_memory = false;
        if (status != -2) ++failures, std::printf("bad: %s without memory returned %d\n", what, status);
    };
    check("pack", [&] { return e.pack(); });
    std::thread([&] { check("linear", [&] { return e.linear(); }); }).join();  // on a thread that holds nothing yet
    for (const int32_t family : {Q4_EXACT, Q4_A8, Q4_A16})
        for (const int64_t x_rows : {1, 5, 80}) {
            std::vector<float> x(static_cast<size_t>(x_rows * kColumns), 1.0f), y(static_cast<size_t>(x_rows * kRows));
            e.call.family = family, e.call.x = x.data(), e.call.x_rows = x_rows, e.call.y = y.data();
            if (e.linear() != 0) ++failures, std::puts("bad: a call before one without memory failed");
            t_has_no_memory = true;
            const int32_t status = e.linear();
            t_has_no_memory = false;
            if (status != 0) ++failures, std::printf("bad: a second call with %ld rows wanted memory\n", static_cast<long>(x_rows));
        }
    e.call.x = e.x.data(), e.call.x_rows = 2, e.call.y = e.y.data();
    if (e.pack() != 0 || e.linear() != 0) ++failures, std::puts("bad: want of memory did not pass");
    return failures;
}

}  // namespace

int bad(const Arguments& a) {
    int failures = 0;
    for (const Isa& isa : a.isas) failures += judge(kSpoilt, -1, isa.number) + judge(kSound, 0, isa.number) + judge_memory(isa.number);
    std::printf("bad: %s\n", failures ? "FAILED" : "passed");
    return failures ? 1 : 0;
}

}  // namespace q4test
