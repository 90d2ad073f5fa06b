// Ordinary use, checked: executors, addresses, streams, events, memory, handles. Run as a test and under memcheck.
#include <atomic>
#include <memory>
#include <thread>

#include "call.h"

namespace {

std::atomic<int> failures{0};

void require(bool holds, const char *what, int line)
{
    if (!holds)
        failures++, std::printf("FAILED line %d: %s\n", line, what);
}
#define REQUIRE(condition) require((condition), #condition, __LINE__)
#define FAILS(call, status) require((call) == (status) && aclGetRecentErrMsg() != nullptr, #call " gives " #status, __LINE__)
#define WORKS(call) require((call) == 0, #call, __LINE__)

// Device memory with floats in it.
struct Block {
    explicit Block(const std::vector<float> &values) : bytes(values.size() * sizeof(float))
    {
        WORKS(aclrtMalloc(&data, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
        WORKS(aclrtMemcpy(data, bytes, values.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE));
    }
    ~Block() { aclrtFree(data); }
    Block(const Block &) = delete;
    Block &operator=(const Block &) = delete;

    std::vector<float> values() const
    {
        std::vector<float> host(bytes / sizeof(float));
        WORKS(aclrtMemcpy(host.data(), bytes, data, bytes, ACL_MEMCPY_DEVICE_TO_HOST));
        return host;
    }
    aclTensor *tensor(const Shape &shape, const Shape &strides = {}, int64_t offset = 0) const
    {
        const int64_t whole = static_cast<int64_t>(bytes / sizeof(float));
        return aclCreateTensor(shape.data(), shape.size(), ACL_FLOAT, strides.empty() ? nullptr : strides.data(), offset,
                               ACL_FORMAT_ND, &whole, 1, data);
    }

    size_t bytes;
    void *data = nullptr;
};

using Tensor = std::unique_ptr<aclTensor, aclnnStatus (*)(const aclTensor *)>;
Tensor own(aclTensor *tensor) { return Tensor(tensor, aclDestroyTensor); }

// LayerNorm backward of two rows of two elements whose result is known.
struct Known {
    explicit Known(bool addressed = true)
        : data({2, 3, 4, 5}), mean({2, 3}), rstd({4, 5}), result({0, 0, 0, 0}),
          input(own(addressed ? data.tensor({2, 2}) : unaddressed({2, 2}))), meanTensor(own(mean.tensor({2, 1}))),
          rstdTensor(own(rstd.tensor({2, 1}))), output(own(addressed ? result.tensor({2, 2}) : unaddressed({2, 2})))
    {
    }
    static aclTensor *unaddressed(const Shape &shape)
    {
        return aclCreateTensor(shape.data(), shape.size(), ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, shape.data(),
                               shape.size(), nullptr);
    }
    aclnnStatus plan()
    {
        const int64_t shape = 2;
        const bool wanted[] = {true, false, false};
        aclIntArray *normalized = aclCreateIntArray(&shape, 1);
        aclBoolArray *mask = aclCreateBoolArray(wanted, 3);
        const aclnnStatus status = aclnnLayerNormBackwardGetWorkspaceSize(
            input.get(), input.get(), normalized, meanTensor.get(), rstdTensor.get(), nullptr, nullptr, mask,
            output.get(), nullptr, nullptr, &size, &executor);
        aclDestroyIntArray(normalized);
        aclDestroyBoolArray(mask);
        if (status == 0 && size > 0 && !workspace)
            WORKS(aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_NORMAL_ONLY));
        return status;
    }
    aclnnStatus run(aclrtStream stream = nullptr) { return aclnnLayerNormBackward(workspace, size, executor, stream); }
    ~Known()
    {
        if (workspace)
            aclrtFree(workspace);
    }
    Known(const Known &) = delete;
    Known &operator=(const Known &) = delete;

    Block data, mean, rstd, result;
    Tensor input, meanTensor, rstdTensor, output;
    uint64_t size = 0;
    aclOpExecutor *executor; // not initialised: only written
    void *workspace = nullptr;
};
const std::vector<float> RIGHT = {-2, -94, -877.5f, -1747.5f};

void executors()
{
    Known once;
    WORKS(once.plan());
    WORKS(once.run());
    WORKS(aclrtSynchronizeStream(nullptr));
    REQUIRE(once.result.values() == RIGHT);
    FAILS(once.run(), 161002);
    FAILS(aclSetAclOpExecutorRepeatable(once.executor), 161002);
    FAILS(aclDestroyAclOpExecutor(once.executor), 161002);
    FAILS(aclSetAclOpExecutorRepeatable(nullptr), 561103);
    FAILS(aclDestroyAclOpExecutor(nullptr), 561103);

    Known often;
    WORKS(often.plan());
    WORKS(aclSetAclOpExecutorRepeatable(often.executor));
    for (int i = 0; i < 3; i++)
        WORKS(often.run());
    Block other({4, 5, 2, 3}), elsewhere({0, 0, 0, 0}), means({3, 2}), stds({5, 4});
    WORKS(aclSetInputTensorAddr(often.executor, 0, often.input.get(), other.data));
    WORKS(aclSetTensorAddr(often.executor, 1, often.input.get(), other.data));
    WORKS(aclSetInputTensorAddr(often.executor, 2, often.meanTensor.get(), means.data));
    WORKS(aclSetInputTensorAddr(often.executor, 3, often.rstdTensor.get(), stds.data));
    WORKS(aclSetOutputTensorAddr(often.executor, 0, often.output.get(), elsewhere.data));
    WORKS(often.run());
    WORKS(aclrtSynchronizeStream(nullptr));
    REQUIRE(often.result.values() == RIGHT);
    REQUIRE((elsewhere.values() == std::vector<float>{-877.5f, -1747.5f, -2, -94}));
    FAILS(aclSetInputTensorAddr(often.executor, 6, often.input.get(), other.data), 161002);
    FAILS(aclSetInputTensorAddr(often.executor, 4, often.input.get(), other.data), 161002); // weight: absent
    FAILS(aclSetOutputTensorAddr(often.executor, 3, often.input.get(), other.data), 161002);
    FAILS(aclSetTensorAddr(often.executor, 0, nullptr, other.data), 561103);
    FAILS(aclSetTensorAddr(nullptr, 0, often.input.get(), other.data), 561103);
    FAILS(aclSetTensorAddr(often.executor, 0, often.meanTensor.get(), other.data), 161002); // another layout
    FAILS(aclSetTensorAddr(often.executor, 0, often.input.get(), &failures), 161002);       // not ours
    WORKS(aclDestroyAclOpExecutor(often.executor));
    FAILS(often.run(), 161002);

    Known later(false);
    WORKS(later.plan());
    WORKS(aclSetAclOpExecutorRepeatable(later.executor));
    FAILS(later.run(), 161002);
    WORKS(aclSetInputTensorAddr(later.executor, 0, later.input.get(), later.data.data));
    WORKS(aclSetInputTensorAddr(later.executor, 1, later.input.get(), later.data.data));
    WORKS(aclSetOutputTensorAddr(later.executor, 0, later.output.get(), later.result.data));
    WORKS(later.run());
    WORKS(aclrtSynchronizeStream(nullptr));
    REQUIRE(later.result.values() == RIGHT);
    WORKS(aclDestroyAclOpExecutor(later.executor));

    FAILS(aclnnGroupNormBackward(nullptr, 0, nullptr, nullptr), 161001);
    Known wrong;
    WORKS(wrong.plan());
    FAILS(aclnnGroupNormBackward(wrong.workspace, wrong.size, wrong.executor, nullptr), 161002);
    WORKS(wrong.run());
    WORKS(aclrtSynchronizeDevice());
}

// Memory freed and tensors destroyed while the work that uses them may still be under way.
void freedInFlight()
{
    const int64_t shape[] = {64, 256}, row = 256;
    const bool wanted[] = {true, true, true};
    for (int round = 0; round < 20; round++) {
        std::vector<void *> blocks;
        const auto make = [&](const int64_t *dims, uint64_t rank, size_t bytes) {
            void *data = nullptr;
            WORKS(aclrtMalloc(&data, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
            WORKS(aclrtMemset(data, bytes, 0, bytes));
            blocks.push_back(data);
            return own(aclCreateTensor(dims, rank, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, rank, data));
        };
        const int64_t statistics[] = {64, 1};
        Tensor input = make(shape, 2, 64 * 256 * 4), output = make(shape, 2, 64 * 256 * 4);
        Tensor mean = make(statistics, 2, 256), rstd = make(statistics, 2, 256);
        Tensor weight = make(&row, 1, 1024), gradWeight = make(&row, 1, 1024), gradBias = make(&row, 1, 1024);
        std::unique_ptr<aclIntArray, aclnnStatus (*)(const aclIntArray *)> normalized(aclCreateIntArray(&row, 1),
                                                                                      aclDestroyIntArray);
        std::unique_ptr<aclBoolArray, aclnnStatus (*)(const aclBoolArray *)> mask(aclCreateBoolArray(wanted, 3),
                                                                                  aclDestroyBoolArray);
        uint64_t size = 0;
        aclOpExecutor *executor = nullptr;
        WORKS(aclnnLayerNormBackwardGetWorkspaceSize(input.get(), input.get(), normalized.get(), mean.get(), rstd.get(),
                                                     weight.get(), nullptr, mask.get(), output.get(), gradWeight.get(),
                                                     gradBias.get(), &size, &executor));
        void *workspace = nullptr;
        if (size > 0) {
            WORKS(aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_HUGE_FIRST));
            blocks.push_back(workspace);
        }
        WORKS(aclnnLayerNormBackward(workspace, size, executor, nullptr));
        for (void *block : blocks)
            WORKS(aclrtFree(block));
    }
    WORKS(aclrtSynchronizeDevice());
}

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
    const size_t bytes = 1 << 24;
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

    // A run that returns before the work is done, and a timeout meanwhile.
    for (int i = 0; i < 50; i++)
        WORKS(aclrtMemsetAsync(a, bytes, i, bytes, first));
    WORKS(aclrtStreamQuery(first, &status));
    REQUIRE(status == ACL_STREAM_STATUS_NOT_READY);
    FAILS(aclrtSynchronizeStreamWithTimeout(first, 0), 107019);
    FAILS(aclrtSynchronizeStreamWithTimeout(first, -2), 107000);
    WORKS(aclrtSynchronizeStream(first));

    // An error of the work itself is told by synchronise, once.
    WORKS(aclrtMemcpyAsync(reinterpret_cast<void *>(0x10), 8, a, 8, ACL_MEMCPY_DEVICE_TO_HOST, first));
    REQUIRE(aclrtSynchronizeStream(first) != 0 && aclGetRecentErrMsg() != nullptr);
    WORKS(aclrtSynchronizeStream(first));

    FAILS(aclrtDestroyStream(start), 107017); // a handle of another kind
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
}

void handles()
{
    Block block({0, 1, 2, 3, 4, 5});
    aclTensor *tensor = block.tensor({2, 2}, {1, 3}, 1);
    int64_t *dims = nullptr;
    uint64_t count = 0;
    WORKS(aclGetViewShape(tensor, &dims, &count));
    REQUIRE(count == 2 && dims[0] == 2 && dims[1] == 2);
    delete[] dims;
    WORKS(aclGetViewStrides(tensor, &dims, &count));
    REQUIRE(count == 2 && dims[0] == 1 && dims[1] == 3);
    delete[] dims;
    WORKS(aclGetStorageShape(tensor, &dims, &count));
    REQUIRE(count == 1 && dims[0] == 6);
    delete[] dims;
    int64_t offset = 0;
    aclFormat format;
    aclDataType type;
    void *address = nullptr;
    WORKS(aclGetViewOffset(tensor, &offset));
    WORKS(aclGetFormat(tensor, &format));
    WORKS(aclGetDataType(tensor, &type));
    WORKS(aclGetRawTensorAddr(tensor, &address));
    REQUIRE(offset == 1 && format == ACL_FORMAT_ND && type == ACL_FLOAT && address == block.data);
    WORKS(aclSetRawTensorAddr(tensor, nullptr));
    WORKS(aclGetRawTensorAddr(tensor, &address));
    REQUIRE(address == nullptr);
    FAILS(aclGetViewShape(nullptr, &dims, &count), 161001);
    FAILS(aclGetViewShape(tensor, nullptr, &count), 161001);
    FAILS(aclGetViewShape(tensor, &dims, nullptr), 161001);
    FAILS(aclGetViewOffset(tensor, nullptr), 161001);
    FAILS(aclDestroyScalar(reinterpret_cast<aclScalar *>(tensor)), 161002);
    WORKS(aclDestroyTensor(tensor));
    FAILS(aclDestroyTensor(tensor), 161002);
    FAILS(aclGetFormat(tensor, &format), 161002);
    WORKS(aclDestroyTensor(nullptr));

    const int64_t numbers[] = {1, 2, 3};
    const float reals[] = {1, 2};
    const bool flags[] = {true};
    aclIntArray *ints = aclCreateIntArray(numbers, 3);
    aclFloatArray *floats = aclCreateFloatArray(reals, 2);
    aclBoolArray *bools = aclCreateBoolArray(flags, 1);
    WORKS(aclGetIntArraySize(ints, &count));
    REQUIRE(count == 3);
    WORKS(aclGetFloatArraySize(floats, &count));
    REQUIRE(count == 2);
    WORKS(aclGetBoolArraySize(bools, &count));
    REQUIRE(count == 1);
    FAILS(aclGetIntArraySize(nullptr, &count), 161001);
    FAILS(aclGetIntArraySize(reinterpret_cast<aclIntArray *>(floats), &count), 161002);
    WORKS(aclDestroyIntArray(ints));
    WORKS(aclDestroyFloatArray(floats)); // bools are never destroyed: programs do that

    const aclTensor *elements[] = {block.tensor({6}), block.tensor({6})};
    aclTensorList *list = aclCreateTensorList(elements, 2);
    WORKS(aclGetTensorListSize(list, &count));
    REQUIRE(count == 2);
    WORKS(aclDestroyTensorList(list));
    FAILS(aclDestroyTensor(elements[0]), 161002); // went with the list
    REQUIRE(aclCreateTensorList(elements, 2) == nullptr && aclGetRecentErrMsg() != nullptr);
    double number = 1.5;
    const aclScalar *scalars[] = {aclCreateScalar(&number, ACL_DOUBLE)};
    aclScalarList *scalarList = aclCreateScalarList(scalars, 1);
    WORKS(aclGetScalarListSize(scalarList, &count));
    REQUIRE(count == 1);
    WORKS(aclDestroyScalarList(scalarList));
    REQUIRE(aclCreateScalar(nullptr, ACL_FLOAT) == nullptr && aclGetRecentErrMsg() != nullptr);
    REQUIRE(aclCreateTensor(nullptr, 2, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 0, nullptr) == nullptr);
    REQUIRE(aclCreateTensor(numbers, 3, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 1, nullptr) == nullptr);
    REQUIRE(aclGetRecentErrMsg() != nullptr && aclGetRecentErrMsg() == nullptr);
    aclTensor *scalar = aclCreateTensor(nullptr, 0, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 0, nullptr);
    REQUIRE(scalar != nullptr);
    WORKS(aclGetViewShape(scalar, &dims, &count));
    REQUIRE(count == 0);
    delete[] dims;
    WORKS(aclDestroyTensor(scalar));
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
    WORKS(aclnnInit(nullptr));
    WORKS(aclrtSetDevice(0));
    handles();
    memory();
    streamsAndEvents();
    contextsAndParameters();
    executors();
    freedInFlight();
    texts();
    WORKS(aclnnFinalize());
    Known late; // freed after the end, as programs' destructors do
    WORKS(late.plan());
    WORKS(aclrtResetDevice(0));
    WORKS(aclFinalize());
    FAILS(aclFinalize(), 100037);
    std::printf("%d failed\n", failures.load());
    return failures ? 1 : 0;
}
