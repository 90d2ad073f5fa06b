// Ends in the way its argument names; in every one of them the process must end well.
#include <unistd.h>

#include "call.h"

namespace {

struct Last {
    void *data = nullptr;
    aclrtStream stream = nullptr;
    aclrtEvent event = nullptr;
    ~Last()
    {
        if (event)
            aclrtDestroyEvent(event);
        if (stream)
            aclrtSynchronizeStream(stream), aclrtDestroyStream(stream);
        if (data)
            aclrtFree(data);
    }
} last;

} // namespace

int main(int count, char **arguments)
{
    const std::string way = count > 1 ? arguments[1] : "returns";
    const size_t bytes = 1 << 26;
    aclInit(nullptr);
    aclrtSetDevice(0);
    void *data = nullptr;
    aclrtStream stream = nullptr;
    aclrtEvent event = nullptr;
    if (aclrtMalloc(&data, bytes, ACL_MEM_MALLOC_HUGE_FIRST) != 0 || aclrtCreateStream(&stream) != 0 ||
        aclrtCreateEvent(&event) != 0 || aclrtRecordEvent(event, stream) != 0)
        return 1;
    if (way == "static" || way == "plan") // freed when the library has seen the end
        last.data = data, last.stream = stream, last.event = event;
    if (way == "stream" || way == "work")
        for (int i = 0; i < 200; i++)
            aclrtMemsetAsync(data, bytes, i, bytes, stream);
    if (way == "work") // only its effect tells that it was done
        aclrtMemsetAsync(data, bytes, 1, bytes, nullptr);
    if (way == "event")
        aclrtDestroyStream(stream);
    if (way == "plan") {
        const Operator op = layerNormBackward();
        Arguments *never = new Arguments(op.sound());
        uint64_t size = 0;
        aclOpExecutor *executor = nullptr;
        if (op.plan(*never, &size, &executor) != 0)
            return 2;
    }
    if (way == "finalises") {
        aclrtDestroyEvent(event);
        aclrtDestroyStream(stream);
        aclrtFree(data);
        aclrtResetDevice(0);
        aclFinalize();
    }
    std::printf("%s\n", way.c_str());
    std::fflush(stdout);
    if (way == "exits")
        std::exit(0);
    if (way == "quits")
        _exit(0);
    return 0;
}
