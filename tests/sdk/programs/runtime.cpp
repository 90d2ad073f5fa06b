// The runtime in ordinary and in wrong use, checked: memory, streams, events, contexts, parameters, texts.
#include <cstdlib>
#include <thread>

#include "checks.h"

namespace {

void memory()
{
    void *data = nullptr;
    FAILS(aclrtMalloc(nullptr, 8, ACL_MEM_MALLOC_HUGE_FIRST), 100000);
    FAILS(aclrtMalloc(&data, 0, ACL_MEM_MALLOC_HUGE_FIRST), 100000);
    FAILS(aclrtMalloc(&data, SIZE_MAX / 2, ACL_MEM_MALLOC_HUGE_FIRST), 207001);
    FAILS(aclrtMalloc(reinterpret_cast<void **>(0x10), 8, ACL_MEM_MALLOC_HUGE_FIRST), 107000);
    WORKS(aclrtMalloc(&data, 100, ACL_MEM_MALLOC_NORMAL_ONLY));
    REQUIRE(reinterpret_cast<uintptr_t>(data) % 64 == 0);
    char host[256] = {}, back[256] = {};
    for (int i = 0; i < 256; i++)
        host[i] = static_cast<char>(i);
    WORKS(aclrtMemcpy(data, 100, host, 100, ACL_MEMCPY_HOST_TO_DEVICE));
    WORKS(aclrtMemcpy(back, 100, data, 100, ACL_MEMCPY_DEVICE_TO_HOST));
    REQUIRE(std::memcmp(host, back, 100) == 0);
    WORKS(aclrtMemcpy(nullptr, 0, nullptr, 0, ACL_MEMCPY_HOST_TO_DEVICE));
    FAILS(aclrtMemcpy(data, 10, host, 11, ACL_MEMCPY_HOST_TO_DEVICE), 107000);
    FAILS(aclrtMemcpy(nullptr, 10, host, 10, ACL_MEMCPY_HOST_TO_DEVICE), 100000);
    FAILS(aclrtMemcpy(data, 10, nullptr, 10, ACL_MEMCPY_HOST_TO_DEVICE), 100000);
    FAILS(aclrtMemcpy(data, 101, host, 101, ACL_MEMCPY_HOST_TO_DEVICE), 107000);
    FAILS(aclrtMemcpy(back, 101, data, 101, ACL_MEMCPY_DEVICE_TO_HOST), 107000);
    FAILS(aclrtMemcpy(back, 10, host, 10, ACL_MEMCPY_DEVICE_TO_HOST), 107000);
    FAILS(aclrtMemcpy(back, 10, data, 10, ACL_MEMCPY_HOST_TO_HOST), 107000);
    FAILS(aclrtMemcpy(data, 10, reinterpret_cast<void *>(0x10), 10, ACL_MEMCPY_HOST_TO_DEVICE), 107000);
    FAILS(aclrtMemcpy(reinterpret_cast<void *>(0x10), 10, data, 10, ACL_MEMCPY_DEVICE_TO_HOST), 107000);
    FAILS(aclrtMemcpy(back, 10, host, 10, static_cast<aclrtMemcpyKind>(5)), 107000);
    WORKS(aclrtMemcpy(back + 100, 100, host, 100, ACL_MEMCPY_DEFAULT));
    REQUIRE(std::memcmp(host, back + 100, 100) == 0);
    WORKS(aclrtMemcpy(static_cast<char *>(data) + 1, 99, data, 99, ACL_MEMCPY_DEVICE_TO_DEVICE)); // overlapping
    WORKS(aclrtMemcpy(back, 100, data, 100, ACL_MEMCPY_DEFAULT));
    REQUIRE(back[0] == 0 && std::memcmp(host, back + 1, 99) == 0);
    WORKS(aclrtMemset(data, 100, 7, 50));
    FAILS(aclrtMemset(back, 256, 7, 5), 107000); // not allocated here
    FAILS(aclrtMemset(data, 100, 7, 101), 107000);
    FAILS(aclrtMemset(data, 200, 7, 101), 107000);
    FAILS(aclrtMemset(reinterpret_cast<void *>(0x10), 8, 7, 8), 107000);
    FAILS(aclrtMemset(nullptr, 8, 7, 8), 100000);
    FAILS(aclrtFree(nullptr), 100000);
    FAILS(aclrtFree(host), 107000);
    FAILS(aclrtFree(static_cast<char *>(data) + 1), 107000);
    FAILS(aclrtFreeHost(data), 107000);
    WORKS(aclrtFree(data));
    FAILS(aclrtFree(data), 107000);
    FAILS(aclrtMemcpy(data, 10, host, 10, ACL_MEMCPY_HOST_TO_DEVICE), 107000);
    void *pinned = nullptr;
    WORKS(aclrtMallocHost(&pinned, 100));
    WORKS(aclrtMemcpy(pinned, 100, host, 100, ACL_MEMCPY_HOST_TO_HOST));
    WORKS(aclrtMemset(pinned, 100, -1, 5));
    REQUIRE(static_cast<char *>(pinned)[4] == -1 && static_cast<char *>(pinned)[5] == 5);
    FAILS(aclrtMemcpy(pinned, 101, host, 101, ACL_MEMCPY_HOST_TO_HOST), 107000);
    FAILS(aclrtFree(pinned), 107000);
    WORKS(aclrtFreeHost(pinned));
    FAILS(aclrtFreeHost(pinned), 107000);
    void *blocks[4] = {}; // an overrun is told of the block where it begins, not of those that it reaches
    for (int i = 0; i < 4; i++)
        WORKS(aclrtMalloc(&blocks[i], 501 + i, ACL_MEM_MALLOC_HUGE_FIRST));
    for (int i = 0; i < 4; i++) {
        REQUIRE(aclrtMemset(blocks[i], SIZE_MAX, 0, SIZE_MAX) == 107000);
        const std::string own = "stay inside its allocation of " + std::to_string(501 + i) + " bytes";
        REQUIRE(std::strstr(aclGetRecentErrMsg(), own.c_str()));
    }
    for (void *block : blocks)
        WORKS(aclrtFree(block));
    size_t free = 0, total = 0;
    WORKS(aclrtGetMemInfo(ACL_HBM_MEM, &free, &total));
    REQUIRE(free > 0 && free <= total);
    FAILS(aclrtGetMemInfo(static_cast<aclrtMemAttr>(9), &free, &total), 100000);
}

void streamsAndEvents()
{
    aclrtStream first = nullptr, second = nullptr;
    WORKS(aclrtCreateStream(&first));
    WORKS(aclrtCreateStreamWithConfig(&second, 0, 0));
    FAILS(aclrtCreateStream(nullptr), 100000);
    aclrtEvent start = nullptr, end = nullptr, never = nullptr;
    WORKS(aclrtCreateEvent(&start));
    WORKS(aclrtCreateEventWithFlag(&end, 0));
    WORKS(aclrtCreateEvent(&never));
    const size_t bytes = std::getenv("NORMGRAD_DEVICE") ? 1 << 28 : 1 << 24; // long enough to be seen at work
    void *a = nullptr, *b = nullptr;
    WORKS(aclrtMalloc(&a, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
    WORKS(aclrtMalloc(&b, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
    WORKS(aclrtRecordEvent(start, first));
    for (int value = 1; value <= 8; value++) // in order: the last one stays
        WORKS(aclrtMemsetAsync(a, bytes, value, bytes, first));
    WORKS(aclrtRecordEvent(end, first));
    WORKS(aclrtStreamWaitEvent(second, end));
    WORKS(aclrtMemcpyAsync(b, bytes, a, bytes, ACL_MEMCPY_DEVICE_TO_DEVICE, second));
    std::vector<char> host(bytes);
    WORKS(aclrtMemcpyAsync(host.data(), bytes, b, bytes, ACL_MEMCPY_DEVICE_TO_HOST, second));
    WORKS(aclrtSynchronizeStreamWithTimeout(second, 60000));
    REQUIRE(host[0] == 8 && host[bytes - 1] == 8);
    WORKS(aclrtSynchronizeEvent(end));
    WORKS(aclrtSynchronizeEvent(never));
    float ms = -1;
    WORKS(aclrtEventElapsedTime(&ms, start, end));
    REQUIRE(ms > 0);
    FAILS(aclrtEventElapsedTime(&ms, start, never), 107000);
    aclrtEventRecordedStatus recorded;
    WORKS(aclrtQueryEventStatus(end, &recorded));
    REQUIRE(recorded == ACL_EVENT_RECORDED_STATUS_COMPLETE);
    WORKS(aclrtQueryEventStatus(never, &recorded));
    REQUIRE(recorded == ACL_EVENT_RECORDED_STATUS_NOT_READY);
    WORKS(aclrtResetEvent(end, first));
    WORKS(aclrtQueryEventStatus(end, &recorded));
    REQUIRE(recorded == ACL_EVENT_RECORDED_STATUS_NOT_READY);
    aclrtStreamStatus status;
    WORKS(aclrtStreamQuery(second, &status));
    REQUIRE(status == ACL_STREAM_STATUS_COMPLETE);

    // A run that returns before the work is done, and a timeout meanwhile: work for longer than a busy machine pauses.
    const size_t many = 1 << 28;
    void *large = nullptr;
    WORKS(aclrtMalloc(&large, many, ACL_MEM_MALLOC_HUGE_FIRST));
    const int times = std::getenv("NORMGRAD_DEVICE") ? 500 : 20;
    for (int i = 0; i < times; i++)
        WORKS(aclrtMemsetAsync(large, many, i, many, first));
    WORKS(aclrtStreamQuery(first, &status));
    REQUIRE(status == ACL_STREAM_STATUS_NOT_READY);
    FAILS(aclrtSynchronizeStreamWithTimeout(first, 0), 107019);
    FAILS(aclrtSynchronizeStreamWithTimeout(first, -2), 107000);
    WORKS(aclrtSynchronizeStream(first));
    WORKS(aclrtFree(large));

    // An error of the work itself is told by synchronise, once.
    WORKS(aclrtMemcpyAsync(reinterpret_cast<void *>(0x10), 8, a, 8, ACL_MEMCPY_DEVICE_TO_HOST, first));
    REQUIRE(aclrtSynchronizeStream(first) != 0 && aclGetRecentErrMsg() != nullptr);
    WORKS(aclrtSynchronizeStream(first));

    FAILS(aclrtDestroyStream(start), 107017); // a handle of another type
    FAILS(aclrtDestroyEvent(first), 107017);
    FAILS(aclrtSynchronizeStream(a), 107017);
    FAILS(aclrtDestroyStream(nullptr), 100000);
    WORKS(aclrtDestroyEvent(start));
    FAILS(aclrtRecordEvent(start, first), 107017);
    FAILS(aclrtDestroyEvent(start), 107017);
    WORKS(aclrtMemsetAsync(a, bytes, 9, bytes, first));
    WORKS(aclrtDestroyStream(first)); // waits
    WORKS(aclrtMemcpy(host.data(), bytes, a, bytes, ACL_MEMCPY_DEVICE_TO_HOST));
    REQUIRE(host[bytes - 1] == 9);
    FAILS(aclrtDestroyStream(first), 107017);
    FAILS(aclrtSynchronizeStream(first), 107017);
    WORKS(aclrtDestroyStream(second));
    WORKS(aclrtDestroyEvent(end));
    WORKS(aclrtDestroyEvent(never));
    WORKS(aclrtFree(a));
    WORKS(aclrtFree(b));
}

void contextsAndParameters()
{
    int32_t device = -1;
    uint32_t count = 0;
    WORKS(aclrtGetDevice(&device));
    WORKS(aclrtGetDeviceCount(&count));
    REQUIRE(device == 0 && count >= 1);
    FAILS(aclrtSetDevice(static_cast<int32_t>(count)), 107001);
    FAILS(aclrtSetDevice(-1), 107001);
    FAILS(aclrtGetDevice(nullptr), 100000);
    aclrtRunMode mode;
    WORKS(aclrtGetRunMode(&mode));
    REQUIRE(mode == ACL_HOST);
    aclrtContext ours = nullptr, made = nullptr, now = nullptr;
    WORKS(aclrtGetCurrentContext(&ours));
    WORKS(aclrtCreateContext(&made, 0));
    WORKS(aclrtGetCurrentContext(&now));
    REQUIRE(now == made && made != ours);
    int64_t value = -1;
    FAILS(aclrtCtxGetSysParamOpt(ACL_OPT_DETERMINISTIC, &value), 107021);
    WORKS(aclrtCtxSetSysParamOpt(ACL_OPT_DETERMINISTIC, 3));
    WORKS(aclrtCtxGetSysParamOpt(ACL_OPT_DETERMINISTIC, &value));
    REQUIRE(value == 3);
    WORKS(aclrtGetSysParamOpt(ACL_OPT_DETERMINISTIC, &value));
    REQUIRE(value == 0);
    WORKS(aclrtSetSysParamOpt(ACL_OPT_DETERMINISTIC, 1));
    WORKS(aclrtGetSysParamOpt(ACL_OPT_DETERMINISTIC, &value));
    REQUIRE(value == 1);
    FAILS(aclrtSetSysParamOpt(ACL_OPT_DETERMINISTIC, 4), 107000);
    FAILS(aclrtSetSysParamOpt(ACL_OPT_DETERMINISTIC, -1), 107000);
    FAILS(aclrtSetSysParamOpt(static_cast<aclSysParamOpt>(3), 0), 100000);
    FAILS(aclrtCtxSetSysParamOpt(static_cast<aclSysParamOpt>(-1), 0), 100000);
    WORKS(aclrtSetCurrentContext(ours));
    FAILS(aclrtCtxGetSysParamOpt(ACL_OPT_DETERMINISTIC, &value), 107021);
    FAILS(aclrtDestroyContext(ours), 107000); // the device's own
    WORKS(aclrtDestroyContext(made));
    FAILS(aclrtSetCurrentContext(made), 107017);
    FAILS(aclrtDestroyContext(made), 107017);
    std::thread([] { // a thread has no context before it is given one
        void *data = nullptr;
        aclrtStream stream = nullptr;
        FAILS(aclrtMalloc(&data, 8, ACL_MEM_MALLOC_HUGE_FIRST), 107002);
        FAILS(aclrtCreateStream(&stream), 107002);
        FAILS(aclrtSynchronizeStream(nullptr), 107002);
        WORKS(aclrtSetDevice(0));
        WORKS(aclrtMalloc(&data, 8, ACL_MEM_MALLOC_HUGE_FIRST));
        WORKS(aclrtFree(data));
        WORKS(aclrtResetDevice(0));
    }).join();
    WORKS(aclrtGetDevice(&device));
    int32_t major = -1, minor = -1, patch = -1;
    WORKS(aclrtGetVersion(&major, &minor, &patch));
    REQUIRE(major >= 0 && minor >= 0 && patch >= 0);
    REQUIRE(aclrtGetSocName() == nullptr);
    const char *text = aclGetRecentErrMsg();
    REQUIRE(text && std::strstr(text, "no product is chosen: NORMGRAD_PRODUCT chooses one"));
}

// Each thread has error texts of its own.
void texts()
{
    REQUIRE(aclrtFree(nullptr) == 100000);
    std::thread([] {
        REQUIRE(aclGetRecentErrMsg() == nullptr);
        REQUIRE(aclrtMemset(nullptr, 1, 0, 1) == 100000);
        const char *text = aclGetRecentErrMsg();
        REQUIRE(text && std::strstr(text, "[PID:") == text && std::strstr(text, "devPtr is null"));
    }).join();
    const char *text = aclGetRecentErrMsg();
    REQUIRE(text && std::strstr(text, "devPtr is null, and must be given"));
    REQUIRE(aclGetRecentErrMsg() == nullptr);
}

} // namespace

int main()
{
    void *data = nullptr;
    FAILS(aclrtMalloc(&data, 8, ACL_MEM_MALLOC_HUGE_FIRST), 107002);
    FAILS(aclFinalize(), 100001);
    WORKS(aclInit(nullptr));
    FAILS(aclInit(nullptr), 100002);
    WORKS(aclrtSetDevice(0));
    memory();
    streamsAndEvents();
    contextsAndParameters();
    texts();
    WORKS(aclrtResetDevice(0));
    WORKS(aclFinalize());
    FAILS(aclFinalize(), 100037);
    std::printf("%d failed\n", failures.load());
    return failures ? 1 : 0;
}
