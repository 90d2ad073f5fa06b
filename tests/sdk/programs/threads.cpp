// Eight threads, each with a stream of its own, make 1,000 calls each and check every result.
#include <atomic>
#include <thread>

#include "call.h"

namespace {

constexpr int THREADS = 8, CALLS = 1000;
std::atomic<int> failures{0};

#define WORKS(call)                                                                                                    \
    do {                                                                                                               \
        const int status = (call);                                                                                     \
        if (status != 0) {                                                                                             \
            const char *text = aclGetRecentErrMsg();                                                                   \
            std::printf("FAILED %s: %d %s\n", #call, status, text ? text : "");                                        \
            failures++;                                                                                                \
            return;                                                                                                    \
        }                                                                                                              \
    } while (0)

// LayerNorm backward of [2, 3, 4, 5] scaled by a power of two, whose result scales by its square or stays exact.
void work(int thread)
{
    WORKS(aclrtSetDevice(0));
    aclrtStream stream = nullptr;
    WORKS(aclrtCreateStream(&stream));
    float *data = nullptr; // gradOut, input, mean, rstd, result
    const size_t bytes = 16 * sizeof(float);
    WORKS(aclrtMalloc(reinterpret_cast<void **>(&data), bytes, ACL_MEM_MALLOC_HUGE_FIRST));
    const int64_t shape[] = {2, 2}, statistics[] = {2, 1}, normalized = 2;
    const bool wanted[] = {true, false, false};
    for (int call = 0; call < CALLS; call++) {
        const float scale = static_cast<float>(1 + (thread * CALLS + call) % 7);
        float host[16] = {2 * scale, 3 * scale, 4 * scale, 5 * scale, 2, 3, 4, 5, 2, 3, 4, 5};
        WORKS(aclrtMemcpyAsync(data, bytes, host, bytes, ACL_MEMCPY_HOST_TO_DEVICE, stream));
        const auto tensor = [](const int64_t *dims, float *at) {
            return aclCreateTensor(dims, 2, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 2, at);
        };
        aclTensor *gradOut = tensor(shape, data), *input = tensor(shape, data + 4), *mean = tensor(statistics, data + 8),
                  *rstd = tensor(statistics, data + 10), *result = tensor(shape, data + 12);
        aclIntArray *dims = aclCreateIntArray(&normalized, 1);
        aclBoolArray *mask = aclCreateBoolArray(wanted, 3);
        uint64_t size = 0;
        aclOpExecutor *executor = nullptr;
        WORKS(aclnnLayerNormBackwardGetWorkspaceSize(gradOut, input, dims, mean, rstd, nullptr, nullptr, mask, result,
                                                     nullptr, nullptr, &size, &executor));
        void *workspace = nullptr;
        if (size > 0)
            WORKS(aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_HUGE_FIRST));
        WORKS(aclnnLayerNormBackward(workspace, size, executor, stream));
        for (aclTensor *each : {gradOut, input, mean, rstd, result})
            WORKS(aclDestroyTensor(each));
        WORKS(aclDestroyIntArray(dims));
        WORKS(aclDestroyBoolArray(mask));
        float back[4] = {};
        WORKS(aclrtMemcpyAsync(back, sizeof back, data + 12, sizeof back, ACL_MEMCPY_DEVICE_TO_HOST, stream));
        WORKS(aclrtSynchronizeStream(stream));
        if (workspace)
            WORKS(aclrtFree(workspace));
        const float right[] = {-2, -94, -877.5f, -1747.5f};
        for (int i = 0; i < 4; i++)
            if (back[i] != right[i] * scale)
                failures++, std::printf("FAILED thread %d, call %d: %g is not %g\n", thread, call,
                                        static_cast<double>(back[i]), static_cast<double>(right[i] * scale));
    }
    WORKS(aclrtFree(data));
    WORKS(aclrtDestroyStream(stream));
    WORKS(aclrtResetDevice(0));
}

} // namespace

int main()
{
    std::vector<std::thread> threads; // the first call of all comes from several threads at once
    for (int thread = 0; thread < THREADS; thread++)
        threads.emplace_back(work, thread);
    for (std::thread &thread : threads)
        thread.join();
    std::printf("%d failed\n", failures.load());
    return failures ? 1 : 0;
}
