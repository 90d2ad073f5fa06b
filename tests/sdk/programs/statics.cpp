// Objects that outlive main and aclFinalize: their destructors call the library when the process ends.
#include <memory>

#include "call.h"

namespace {

std::unique_ptr<void, aclError (*)(void *)> memory(nullptr, aclrtFree);
std::unique_ptr<aclTensor, aclnnStatus (*)(const aclTensor *)> tensor(nullptr, aclDestroyTensor);

struct Last {
    ~Last() { std::printf("freed: %d %d\n", aclDestroyTensor(tensor.release()), aclrtFree(memory.release())); }
} last;

} // namespace

int main()
{
    aclInit(nullptr);
    aclrtSetDevice(0);
    void *data = nullptr;
    aclrtMalloc(&data, 64, ACL_MEM_MALLOC_HUGE_FIRST);
    memory.reset(data);
    const int64_t shape = 16;
    tensor.reset(aclCreateTensor(&shape, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, &shape, 1, data));
    aclrtResetDevice(0);
    return aclFinalize();
}
