// What the samples share: a session on device 0, tensors with their memory, and running an operator.
#ifndef SAMPLES_COMMON_H
#define SAMPLES_COMMON_H

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "acl/acl.h"
#include "aclnn/acl_meta.h"

// Ends the program with the runtime's own words when a call fails.
inline void check(int status, const char *what)
{
    if (status == 0)
        return;
    const char *text = aclGetRecentErrMsg();
    std::printf("%s gave %d: %s\n", what, status, text ? text : "no text");
    std::exit(1);
}
#define CHECK(call) check((call), #call)

inline int64_t numel(const std::vector<int64_t> &shape)
{
    int64_t count = 1;
    for (int64_t size : shape)
        count *= size;
    return count;
}

// The runtime, from the first call to the last, and a stream.
class Session {
public:
    Session()
    {
        CHECK(aclInit(nullptr));
        CHECK(aclrtSetDevice(0));
        CHECK(aclrtCreateStream(&stream_));
    }
    ~Session()
    {
        aclrtDestroyStream(stream_);
        aclrtResetDevice(0);
        aclFinalize();
    }
    Session(const Session &) = delete;
    Session &operator=(const Session &) = delete;
    aclrtStream stream() const { return stream_; }

private:
    aclrtStream stream_ = nullptr;
};

// A contiguous tensor of 4-byte elements, with memory on the device.
class DeviceTensor {
public:
    DeviceTensor(const std::vector<int64_t> &shape, aclDataType type, const void *values) : shape_(shape)
    {
        const size_t bytes = size();
        CHECK(aclrtMalloc(&data_, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
        if (values)
            CHECK(aclrtMemcpy(data_, bytes, values, bytes, ACL_MEMCPY_HOST_TO_DEVICE));
        tensor_ = aclCreateTensor(shape_.data(), shape_.size(), type, nullptr, 0, ACL_FORMAT_ND, shape_.data(),
                                  shape_.size(), data_);
        check(tensor_ ? 0 : 1, "aclCreateTensor");
    }
    DeviceTensor(const std::vector<int64_t> &shape, const std::vector<float> &values)
        : DeviceTensor(shape, ACL_FLOAT, values.data())
    {
    }
    explicit DeviceTensor(const std::vector<int64_t> &shape) : DeviceTensor(shape, ACL_FLOAT, nullptr) {}
    ~DeviceTensor()
    {
        aclDestroyTensor(tensor_);
        aclrtFree(data_);
    }
    DeviceTensor(const DeviceTensor &) = delete;
    DeviceTensor &operator=(const DeviceTensor &) = delete;

    aclTensor *get() const { return tensor_; }

    std::vector<float> values() const
    {
        std::vector<float> host(static_cast<size_t>(numel(shape_)));
        CHECK(aclrtMemcpy(host.data(), size(), data_, size(), ACL_MEMCPY_DEVICE_TO_HOST));
        return host;
    }

private:
    size_t size() const { return static_cast<size_t>(numel(shape_)) * 4; }

    std::vector<int64_t> shape_;
    void *data_ = nullptr;
    aclTensor *tensor_ = nullptr;
};

using Plan = std::function<aclnnStatus(uint64_t *, aclOpExecutor **)>;
using Run = aclnnStatus (*)(void *, uint64_t, aclOpExecutor *, aclrtStream);

// Both phases of an operator: plan, bring the workspace, run, wait.
inline void execute(const Plan &plan, Run run, aclrtStream stream)
{
    uint64_t workspaceSize = 0;
    aclOpExecutor *executor = nullptr;
    CHECK(plan(&workspaceSize, &executor));
    void *workspace = nullptr;
    if (workspaceSize > 0)
        CHECK(aclrtMalloc(&workspace, workspaceSize, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECK(run(workspace, workspaceSize, executor, stream));
    CHECK(aclrtSynchronizeStream(stream));
    if (workspace)
        CHECK(aclrtFree(workspace));
}

inline void print(const char *name, const DeviceTensor &tensor)
{
    std::printf("%s:", name);
    for (float value : tensor.values())
        std::printf(" %.6g", static_cast<double>(value));
    std::printf("\n");
}

inline std::vector<float> counting(float first, size_t count)
{
    std::vector<float> values;
    for (size_t i = 0; i < count; i++)
        values.push_back(first + static_cast<float>(i));
    return values;
}

#endif
