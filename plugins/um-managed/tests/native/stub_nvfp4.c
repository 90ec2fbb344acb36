/* A libNVFP4.so that has the functions for managed memory alone, over memory of the host. With something wrong:
 * STUB_VERSION, STUB_MISSING, STUB_FULL (no memory left), STUB_NO_ADDRESS. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "NVFP4.h"

#ifndef STUB_VERSION
#define STUB_VERSION NVFP4_ABI_VERSION
#endif

enum { MOST = 64, COPIES = 0, PREFETCHES = 1, QUESTIONS = 2 };

static struct {
    const uint8_t* start;
    int64_t size;
} areas[MOST];
static int calls[3];
static int64_t last[4]; /* of the last prefetch: address, bytes, device, stream */

/* -- for tests */

NVFP4_EXPORT int stub_calls(int which) { return calls[which]; }
NVFP4_EXPORT int64_t stub_last(int which) { return last[which]; }
NVFP4_EXPORT void stub_note(const void* start, int64_t size) {
    for (int i = 0; i < MOST; ++i)
        if (areas[i].start == NULL) {
            areas[i].start = start;
            areas[i].size = size;
            return;
        }
    abort();
}
NVFP4_EXPORT void stub_forget(void* start) {
    for (int i = 0; i < MOST; ++i)
        if (areas[i].start == start) areas[i].start = NULL;
}
NVFP4_EXPORT void stub_free(void* start) {
    stub_forget(start);
    free(start);
}

/* -- the ABI */

int32_t NVFP4_abi_version(void) { return STUB_VERSION; }
int32_t NVFP4_can_use_managed(int32_t device) { return device == 0; }
int32_t NVFP4_is_managed_tensor(const void* address) {
    ++calls[QUESTIONS];
    for (int i = 0; i < MOST; ++i)
        if (areas[i].start != NULL && areas[i].start <= (const uint8_t*)address &&
            (const uint8_t*)address < areas[i].start + areas[i].size)
            return 1;
    return 0;
}
int32_t NVFP4_to_managed(const void* source, int64_t bytes, int32_t device, void** managed, void* stream) {
    (void)stream;
    ++calls[COPIES];
    if (source == NULL || managed == NULL || bytes < 1) return NVFP4_BAD_ARGUMENT;
    if (!NVFP4_can_use_managed(device)) return NVFP4_NOT_SUPPORTED;
#ifdef STUB_FULL
    return 2; /* cudaErrorMemoryAllocation */
#endif
#ifndef STUB_NO_ADDRESS
    void* made = malloc((size_t)bytes);
    memcpy(made, source, (size_t)bytes);
    stub_note(made, bytes);
    *managed = made;
#endif
    return NVFP4_OK;
}
#ifndef STUB_MISSING
int32_t NVFP4_managed_prefetch(const void* address, int64_t bytes, int32_t device, void* stream) {
    ++calls[PREFETCHES];
    last[0] = (int64_t)(uintptr_t)address;
    last[1] = bytes;
    last[2] = device;
    last[3] = (int64_t)(uintptr_t)stream;
    return address != NULL && bytes > 0 && device >= -1 ? NVFP4_OK : NVFP4_BAD_ARGUMENT;
}
#endif
