// A program with a Python of its own: the library uses that one, with the interpreter's lock held and without it.
#include <Python.h>

#include <thread>

#include "acl/acl.h"

int main()
{
    Py_Initialize();
    PyRun_SimpleString("import sys; sys.mark_of_the_program = 42; before = list(sys.path)");
    aclError status = aclrtSetDevice(0); // with the lock held
    PyThreadState *state = PyEval_SaveThread();
    std::thread([&] {
        void *data = nullptr;
        status |= aclrtSetDevice(0);
        status |= aclrtMalloc(&data, 64, ACL_MEM_MALLOC_HUGE_FIRST);
        status |= aclrtFree(data);
    }).join();
    PyEval_RestoreThread(state);
    const int python = PyRun_SimpleString("assert sys.mark_of_the_program == 42\n"
                                          "assert 'normgrad.sdk.entry' in sys.modules\n"
                                          "assert sys.path[:len(before)] == before\n"
                                          "print('one interpreter')");
    Py_Finalize();
    const aclError after = aclrtSetDevice(0); // Python is gone: a code and a text, no crash
    const char *text = aclGetRecentErrMsg();
    std::printf("%d %d %s\n", status, after, text ? text : "");
    return status || python || after == 0 || !text;
}
