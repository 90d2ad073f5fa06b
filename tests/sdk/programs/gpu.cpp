// The runtime on a GPU (NORMGRAD_DEVICE=cuda): memory, copies, streams, events.
#include <cstring>
#include <vector>

#include "acl/acl.h"

namespace {

int failures = 0;

void require(bool holds, const char *what, int line)
{
    const char *text = aclGetRecentErrMsg();
    if (!holds)
        failures++, std::printf("FAILED line %d: %s; %s\n", line, what, text ? text : "");
}
#define REQUIRE(condition) require((condition), #condition, __LINE__)

} // namespace

int main()
{
    const size_t bytes = size_t(1) << 28;
    REQUIRE(aclInit(nullptr) == 0);
    REQUIRE(aclrtSetDevice(0) == 0);
    size_t free = 0, total = 0;
    REQUIRE(aclrtGetMemInfo(ACL_HBM_MEM, &free, &total) == 0 && free > 0 && free <= total);
    aclrtStream first = nullptr, second = nullptr;
    aclrtEvent start = nullptr, end = nullptr;
    REQUIRE(aclrtCreateStream(&first) == 0 && aclrtCreateStream(&second) == 0);
    REQUIRE(aclrtCreateEvent(&start) == 0 && aclrtCreateEvent(&end) == 0);
    void *a = nullptr, *b = nullptr, *pinned = nullptr;
    REQUIRE(aclrtMalloc(&a, bytes, ACL_MEM_MALLOC_HUGE_FIRST) == 0);
    REQUIRE(aclrtMalloc(&b, bytes, ACL_MEM_MALLOC_HUGE_FIRST) == 0);
    REQUIRE(aclrtMallocHost(&pinned, 4096) == 0);
    REQUIRE(reinterpret_cast<uintptr_t>(a) % 64 == 0);

    std::vector<char> host(4096), back(4096);
    for (size_t i = 0; i < host.size(); i++)
        host[i] = static_cast<char>(i * 7);
    REQUIRE(aclrtMemcpy(a, bytes, host.data(), 4096, ACL_MEMCPY_HOST_TO_DEVICE) == 0);
    REQUIRE(aclrtMemcpy(b, bytes, a, 4096, ACL_MEMCPY_DEVICE_TO_DEVICE) == 0);
    REQUIRE(aclrtMemcpy(back.data(), 4096, b, 4096, ACL_MEMCPY_DEVICE_TO_HOST) == 0);
    REQUIRE(host == back);
    REQUIRE(aclrtMemcpy(pinned, 4096, b, 4096, ACL_MEMCPY_DEFAULT) == 0);
    REQUIRE(std::memcmp(pinned, host.data(), 4096) == 0);
    REQUIRE(aclrtMemset(pinned, 4096, 5, 4096) == 0 && static_cast<char *>(pinned)[4095] == 5);

    REQUIRE(aclrtRecordEvent(start, first) == 0);
    for (int value = 1; value <= 100; value++)
        REQUIRE(aclrtMemsetAsync(a, bytes, value, bytes, first) == 0);
    REQUIRE(aclrtRecordEvent(end, first) == 0);
    aclrtStreamStatus status;
    REQUIRE(aclrtStreamQuery(first, &status) == 0 && status == ACL_STREAM_STATUS_NOT_READY);
    REQUIRE(aclrtSynchronizeStreamWithTimeout(first, 0) == 107019);
    REQUIRE(aclrtStreamWaitEvent(second, end) == 0);
    REQUIRE(aclrtMemcpyAsync(b, bytes, a, bytes, ACL_MEMCPY_DEVICE_TO_DEVICE, second) == 0);
    REQUIRE(aclrtMemcpyAsync(back.data(), 4096, b, 4096, ACL_MEMCPY_DEVICE_TO_HOST, second) == 0);
    REQUIRE(aclrtSynchronizeStream(second) == 0 && back[0] == 100 && back[4095] == 100);
    float ms = 0;
    REQUIRE(aclrtEventElapsedTime(&ms, start, end) == 0 && ms > 0.5f);
    std::printf("100 times %zu bytes in %.3f ms\n", bytes, static_cast<double>(ms));
    aclrtEventRecordedStatus recorded;
    REQUIRE(aclrtQueryEventStatus(end, &recorded) == 0 && recorded == ACL_EVENT_RECORDED_STATUS_COMPLETE);
    REQUIRE(aclrtSynchronizeEvent(end) == 0 && aclrtSynchronizeDevice() == 0);
    REQUIRE(aclrtSynchronizeStreamWithTimeout(first, 1000) == 0);

    void *wild = reinterpret_cast<void *>(0x10);
    REQUIRE(aclrtMemcpy(a, 8, wild, 8, ACL_MEMCPY_HOST_TO_DEVICE) == 107000);
    REQUIRE(aclrtMemcpy(wild, 8, a, 8, ACL_MEMCPY_DEVICE_TO_HOST) == 107000);
    REQUIRE(aclrtMemcpy(wild, 8, a, 8, ACL_MEMCPY_DEVICE_TO_DEVICE) == 107000);
    REQUIRE(aclrtMemcpy(a, bytes + 1, b, bytes + 1, ACL_MEMCPY_DEVICE_TO_DEVICE) == 107000);
    REQUIRE(aclrtMemset(wild, 8, 0, 8) == 107000);
    REQUIRE(aclrtMalloc(&wild, size_t(1) << 60, ACL_MEM_MALLOC_HUGE_FIRST) == 207001);
    REQUIRE(aclrtFree(b) == 0 && aclrtFree(b) == 107000);
    REQUIRE(aclrtMemsetAsync(a, bytes, 1, bytes, first) == 0 && aclrtFree(a) == 0); // while at work
    REQUIRE(aclrtFreeHost(pinned) == 0);
    REQUIRE(aclrtDestroyStream(first) == 0 && aclrtDestroyStream(second) == 0);
    REQUIRE(aclrtDestroyEvent(start) == 0 && aclrtDestroyEvent(end) == 0);
    REQUIRE(aclrtResetDevice(0) == 0 && aclFinalize() == 0);
    std::printf("%d failed\n", failures);
    return failures ? 1 : 0;
}
