// `flaw`: does what a sanitizer must stop, to show that it is there.
#include <cstdio>
#include <limits>
#include <string>
#include <thread>

#include "commands.hpp"

namespace q4test {

int flaw(const std::string& kind) {
    if (kind == "heap") {
        std::vector<uint8_t> bytes(100);
        volatile size_t past = bytes.size();
        std::printf("read %d past the end\n", bytes.data()[past]);
    } else if (kind == "sign") {
        volatile int32_t most = std::numeric_limits<int32_t>::max();
        most = most + 1;
        std::printf("overflowed to %d\n", most);
    } else if (kind == "race") {
        int64_t count = 0;
        std::thread other([&count] { ++count; });
        ++count;
        other.join();
        std::printf("raced to %lld\n", static_cast<long long>(count));
    } else {
        return 2;
    }
    return 0;
}

}  // namespace q4test
