// Ends without tidying up, with work under way, so many milliseconds after its start: must end well all the same.
#include <unistd.h>

#include "call.h"

int main(int count, char **arguments)
{
    aclInit(nullptr);
    aclrtSetDevice(0);
    const size_t bytes = 1 << 26;
    void *data = nullptr;
    aclrtMalloc(&data, bytes, ACL_MEM_MALLOC_HUGE_FIRST);
    for (int i = 0; i < (count > 1 ? 0 : 20); i++)
        aclrtMemsetAsync(data, bytes, i, bytes, nullptr);
    const Operator op = layerNormBackward();
    Arguments *never = new Arguments(op.sound());
    uint64_t size = 0;
    aclOpExecutor *executor;
    void *workspace = nullptr;
    if (op.plan(*never, &size, &executor) != 0)
        return 1;
    if (size > 0)
        aclrtMalloc(&workspace, size, ACL_MEM_MALLOC_HUGE_FIRST);
    if (op.run(workspace, size, executor, nullptr) != 0)
        return 2;
    if (count > 1)
        usleep(1000 * atoi(arguments[1]));
    std::printf("leaving\n");
    return 0;
}
