// Checks that count their failures, and memory and tensors that go when they are no longer needed.
#ifndef CHECKS_H
#define CHECKS_H

#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

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
inline Tensor own(aclTensor *tensor) { return Tensor(tensor, aclDestroyTensor); }

} // namespace

#endif
