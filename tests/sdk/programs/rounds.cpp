// 10,000 rounds that make and destroy one of everything, and plan, run and fail: memory in use must not grow.
#include <unistd.h>

#include "call.h"

namespace {

size_t residentPages()
{
    size_t whole = 0, resident = 0;
    std::FILE *file = std::fopen("/proc/self/statm", "r");
    if (!file || std::fscanf(file, "%zu %zu", &whole, &resident) != 2)
        return 0;
    std::fclose(file);
    return resident;
}

void round()
{
    const Operator op = layerNormBackward();
    Call call = op.sound();
    Arguments arguments(call);
    uint64_t size = 0;
    aclOpExecutor *executor = nullptr;
    if (op.plan(arguments, &size, &executor) != 0)
        std::exit(2);
    void *workspace = nullptr;
    aclrtStream stream = nullptr;
    aclrtEvent event = nullptr;
    aclrtContext before = nullptr, context = nullptr;
    aclrtGetCurrentContext(&before);
    aclrtCreateContext(&context, 0);
    aclrtCreateStream(&stream);
    aclrtCreateEvent(&event);
    aclrtMalloc(&workspace, size + 1, ACL_MEM_MALLOC_HUGE_FIRST);
    if (op.run(workspace, size, executor, stream) != 0)
        std::exit(3);
    aclrtRecordEvent(event, stream);
    aclrtSynchronizeEvent(event);
    if (op.plan(arguments, &size, &executor) != 0 || aclDestroyAclOpExecutor(executor) != 0)
        std::exit(4);
    aclrtFree(workspace);
    aclrtDestroyEvent(event);
    aclrtDestroyStream(stream);
    aclrtSetCurrentContext(before);
    aclrtDestroyContext(context);
    aclrtFree(workspace); // fails, with a text
    op.run(nullptr, 0, executor, nullptr);
    aclDestroyTensor(reinterpret_cast<const aclTensor *>(0x1));
    int64_t *dims = nullptr;
    uint64_t rank = 0;
    aclGetViewShape(arguments["input"], &dims, &rank);
    delete[] dims;
    float value = 1;
    const aclScalar *scalar = aclCreateScalar(&value, ACL_FLOAT);
    aclDestroyScalarList(aclCreateScalarList(&scalar, 1));
    aclDestroyFloatArray(aclCreateFloatArray(&value, 1));
}

} // namespace

int main(int count, char **arguments)
{
    const int rounds = count > 1 ? std::atoi(arguments[1]) : 10000;
    aclInit(nullptr);
    aclrtSetDevice(0);
    for (int i = 0; i < rounds / 5; i++) // caches fill up
        round();
    const size_t early = residentPages();
    for (int i = rounds / 5; i < rounds; i++)
        round();
    const size_t late = residentPages();
    const long page = sysconf(_SC_PAGESIZE);
    const long grown = (static_cast<long>(late) - static_cast<long>(early)) * page / 1024;
    std::printf("%d rounds, grown by %ld KiB\n", rounds, grown);
    return grown < 1024 ? 0 : 1;
}
