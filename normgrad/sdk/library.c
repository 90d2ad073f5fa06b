/* The native half of the library: starts Python, carries calls over to it, and holds what needs no Python.
 *
 * Every function of the interface packs its arguments into 64-bit words and hands them to normgrad_call, which is
 * Python (normgrad.sdk.entry). Memory that a caller points to is only ever touched by normgrad_copy, which answers
 * an address that cannot be used with an error instead of a fault.
 *
 * NORMGRAD_PYTHON, NORMGRAD_PACKAGE, NORMGRAD_FIND and the functions' table are put in front of this file when it is compiled.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "acl/acl.h"
#include "aclnn/aclnn_base.h"

static void normgrad_call(int32_t function, const uint64_t *words, int64_t *result);

/* The calling thread's error text, and the one it was given last. */

enum { TEXT_SIZE = 4096 };
static _Thread_local char recent_text[TEXT_SIZE];
static _Thread_local char given_text[TEXT_SIZE];

static void normgrad_set_text(const char *text)
{
    size_t length = strlen(text);
    if (length >= TEXT_SIZE) {
        length = TEXT_SIZE - 1;
        while (length > 0 && ((unsigned char)text[length] & 0xC0) == 0x80) /* not inside a character */
            length--;
    }
    memcpy(recent_text, text, length);
    recent_text[length] = '\0';
}

const char *aclGetRecentErrMsg(void)
{
    if (recent_text[0] == '\0')
        return NULL;
    memcpy(given_text, recent_text, TEXT_SIZE);
    recent_text[0] = '\0';
    return given_text;
}

static void set_plain_text(const char *problem)
{
    time_t now = time(NULL);
    struct tm parts;
    char clock[32], text[TEXT_SIZE];
    strftime(clock, sizeof clock, "%Y-%m-%d-%H:%M:%S", localtime_r(&now, &parts));
    snprintf(text, sizeof text, "[PID:%d] %s Acl_Error: %s", (int)getpid(), clock, problem);
    normgrad_set_text(text);
}

/* Memory */

/* The same as normgrad_copy, for a sandbox that forbids its system call: a pipe checks both sides too. A page at a
 * time, which any pipe has room for. */
static int copy_through_pipe(uint64_t to, uint64_t from, uint64_t nbytes)
{
    int ends[2], result = 0;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return -1;
    while (nbytes > 0) {
        ssize_t part = nbytes > 4096 ? 4096 : (ssize_t)nbytes;
        part = write(ends[1], (const void *)(uintptr_t)from, (size_t)part);
        if (part <= 0 || read(ends[0], (void *)(uintptr_t)to, (size_t)part) != part) {
            result = -1;
            break;
        }
        to += (uint64_t)part;
        from += (uint64_t)part;
        nbytes -= (uint64_t)part;
    }
    close(ends[0]);
    close(ends[1]);
    return result;
}

#ifdef NORMGRAD_SANDBOXED
#define process_vm_readv(...) (errno = EPERM, (ssize_t)-1)
#endif

/* Copies between any two addresses; 0, or -1 where one of them cannot be used. The kernel checks both sides.
 * Reading rather than writing, so that memory checkers see what is written. */
static int normgrad_copy(uint64_t to, uint64_t from, uint64_t nbytes)
{
    while (nbytes > 0) {
        size_t part = nbytes > (1u << 30) ? (1u << 30) : (size_t)nbytes;
        struct iovec local = {(void *)(uintptr_t)to, part}, remote = {(void *)(uintptr_t)from, part};
        ssize_t copied = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
        if (copied < 0 && (errno == ENOSYS || errno == EPERM))
            return copy_through_pipe(to, from, nbytes);
        if (copied <= 0)
            return -1;
        to += (uint64_t)copied;
        from += (uint64_t)copied;
        nbytes -= (uint64_t)copied;
    }
    return 0;
}

static void normgrad_move(uint64_t to, uint64_t from, uint64_t nbytes)
{
    memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, nbytes);
}

static void normgrad_fill(uint64_t to, int32_t value, uint64_t nbytes)
{
    memset((void *)(uintptr_t)to, value, nbytes);
}

static uint64_t normgrad_allocate(uint64_t nbytes)
{
    void *memory = NULL;
    return posix_memalign(&memory, 64, nbytes) == 0 ? (uint64_t)(uintptr_t)memory : 0;
}

static void normgrad_release(uint64_t address)
{
    free((void *)(uintptr_t)address);
}

/* Memory that the caller frees with delete[]: from the program's own operator new[], where it has one. */
static uint64_t normgrad_new_array(uint64_t nbytes)
{
    void *(*new_array)(size_t);
    *(void **)&new_array = dlsym(RTLD_DEFAULT, "_Znam");
    return (uint64_t)(uintptr_t)(new_array ? new_array(nbytes) : malloc(nbytes ? nbytes : 1));
}

/* Python: an interpreter of the environment that the library was made in, or the one that is there already. */

static pthread_once_t interpreter_once = PTHREAD_ONCE_INIT;
static int interpreter_is_ours;
static atomic_int ready, ended;
static char start_problem[512];

/* Extension modules look for Python's symbols among the global ones, and a library that was loaded with RTLD_LOCAL
 * brings its libpython along as local. */
static void make_python_global(void)
{
    Dl_info python;
    if (dladdr((void *)(uintptr_t)Py_InitializeFromConfig, &python) && python.dli_fname)
        dlopen(python.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
}

static void start_interpreter(void)
{
    if (Py_IsInitialized())
        return;
    make_python_global();
    PyPreConfig before;
    PyPreConfig_InitIsolatedConfig(&before);
    before.utf8_mode = 1;
    PyStatus status = Py_PreInitialize(&before);
    if (!PyStatus_Exception(status)) {
        PyConfig config;
        PyConfig_InitIsolatedConfig(&config);
        status = PyConfig_SetBytesString(&config, &config.program_name, NORMGRAD_PYTHON);
        if (!PyStatus_Exception(status))
            status = Py_InitializeFromConfig(&config);
        PyConfig_Clear(&config);
    }
    if (PyStatus_Exception(status)) {
        snprintf(start_problem, sizeof start_problem, "Python (%s) does not start: %s", NORMGRAD_PYTHON,
                 status.err_msg ? status.err_msg : "no reason given");
        return;
    }
    interpreter_is_ours = 1;
    PyEval_SaveThread();
}

/* Lets Python find the environment's packages, once the caller has the interpreter's lock. */
static int find_packages(void)
{
    if (strncmp(Py_GetVersion(), PY_VERSION, strcspn(PY_VERSION, ".") + 3) != 0) {
        const char *version = Py_GetVersion(); /* and the compiler, after a blank */
        snprintf(start_problem, sizeof start_problem, "the library was made for Python %s and the process runs %.*s",
                 PY_VERSION, (int)strcspn(version, " "), version);
        return 0;
    }
    PyObject *globals = PyDict_New(), *ours = PyBool_FromLong(interpreter_is_ours), *done = NULL;
    if (globals && ours && PyDict_SetItemString(globals, "__builtins__", PyEval_GetBuiltins()) == 0 &&
        PyDict_SetItemString(globals, "ours", ours) == 0)
        done = PyRun_String(NORMGRAD_FIND, Py_file_input, globals, globals);
    if (!done) {
        PyErr_Clear();
        snprintf(start_problem, sizeof start_problem, "Python's module search path cannot be set");
    }
    Py_XDECREF(ours);
    Py_XDECREF(globals);
    Py_XDECREF(done);
    return done != NULL;
}

/* Whether Python can be called. */
static int python_is_there(void)
{
    if (atomic_load(&ended)) {
        set_plain_text("Python has ended in this process");
        return 0;
    }
    if (atomic_load(&ready))
        return 1;
    if (access(NORMGRAD_PACKAGE, R_OK) != 0) {
        set_plain_text("the Python environment that the library was made in is gone or cannot be read (" NORMGRAD_PACKAGE
                       "): run normgrad sdk again");
        return 0;
    }
    /* A thread that holds the interpreter's lock must not wait for one that may want it. */
    if (!(Py_IsInitialized() && PyGILState_Check()))
        pthread_once(&interpreter_once, start_interpreter);
    if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        if (atomic_load(&ready) || find_packages())
            atomic_store(&ready, 1);
        PyGILState_Release(state);
    }
    if (!atomic_load(&ready))
        set_plain_text(start_problem);
    return atomic_load(&ready);
}

static int64_t call(int32_t function, const uint64_t *words, int64_t failure)
{
    int64_t result = INT64_MIN;
    if (python_is_there()) {
        normgrad_call(function, words, &result);
        if (result == INT64_MIN)
            set_plain_text("the Python half of the library does not start; standard error says why. Where the Python "
                           "environment has changed, run normgrad sdk again");
    }
    return result == INT64_MIN ? failure : result;
}

/* At the end of the process the work of streams is waited for, before what it uses is taken down: once, by the handler
 * that was registered last and so comes first. Those of earlier would come after the libraries loaded since. */
static void finish(void)
{
    static atomic_int finished;
    if (!atomic_load(&ended) && Py_IsInitialized() && !atomic_exchange(&finished, 1))
        call(-1, NULL, 0);
}

static void normgrad_started(void)
{
    atexit(finish);
}

static void normgrad_ended(void)
{
    atomic_store(&ended, 1);
}

/* Element types */

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

float aclFloat16ToFloat(aclFloat16 value)
{
    uint32_t sign = (uint32_t)(value & 0x8000u) << 16, exponent = (value >> 10) & 0x1Fu, fraction = value & 0x3FFu;
    if (exponent == 0x1F)
        return float_of(sign | 0x7F800000u | fraction << 13);
    if (exponent != 0)
        return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    float size = (float)fraction * 0x1p-24f; /* subnormal or zero: exact in float */
    return sign ? -size : size;
}

aclFloat16 aclFloatToFloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    uint32_t size = bits & 0x7FFFFFFFu;
    if (size > 0x7F800000u)
        return sign | 0x7E00u | (uint16_t)(size >> 13 & 0x3FFu);
    if (size >= 0x477FF000u) /* rounds past the largest */
        return sign | 0x7C00u;
    if (size < 0x33000000u) /* half of the least subnormal rounds to zero, and so does less */
        return sign;
    uint32_t exponent = size >> 23, fraction = size & 0x7FFFFFu, shift = 13, base = (exponent - 112) << 10;
    if (exponent < 113) { /* a subnormal: the leading one becomes explicit */
        fraction |= 0x800000u;
        shift = 126 - exponent;
        base = 0;
    }
    uint32_t kept = fraction >> shift, lost = fraction & ((1u << shift) - 1), half = 1u << (shift - 1);
    if (lost > half || (lost == half && (kept & 1)))
        kept++; /* a carry out of the fraction is the next exponent, as it should be */
    return sign | (uint16_t)(base + kept);
}

size_t aclDataTypeSize(aclDataType dataType)
{
    switch (dataType) {
    case ACL_COMPLEX128:
        return 16;
    case ACL_INT64: case ACL_UINT64: case ACL_DOUBLE: case ACL_COMPLEX64:
        return 8;
    case ACL_FLOAT: case ACL_INT32: case ACL_UINT32: case ACL_COMPLEX32:
        return 4;
    case ACL_FLOAT16: case ACL_INT16: case ACL_UINT16: case ACL_BF16:
        return 2;
    case ACL_INT8: case ACL_UINT8: case ACL_BOOL: case ACL_INT4: case ACL_UINT1: case ACL_HIFLOAT8:
    case ACL_FLOAT8_E5M2: case ACL_FLOAT8_E4M3FN: case ACL_FLOAT8_E8M0: case ACL_FLOAT6_E3M2:
    case ACL_FLOAT6_E2M3: case ACL_FLOAT4_E2M1: case ACL_FLOAT4_E1M2:
        return 1;
    default:
        return 0;
    }
}
