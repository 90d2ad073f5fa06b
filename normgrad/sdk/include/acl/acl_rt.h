/* Devices, contexts, streams, events, memory, system parameters. Part of normgrad. */
#ifndef NORMGRAD_ACL_RT_H
#define NORMGRAD_ACL_RT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "acl/acl_base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    ACL_MEMCPY_HOST_TO_HOST = 0,
    ACL_MEMCPY_HOST_TO_DEVICE = 1,
    ACL_MEMCPY_DEVICE_TO_HOST = 2,
    ACL_MEMCPY_DEVICE_TO_DEVICE = 3,
    ACL_MEMCPY_DEFAULT = 4
} aclrtMemcpyKind;

typedef enum {
    ACL_MEM_MALLOC_HUGE_FIRST = 0,
    ACL_MEM_MALLOC_HUGE_ONLY = 1,
    ACL_MEM_MALLOC_NORMAL_ONLY = 2,
    ACL_MEM_MALLOC_HUGE_FIRST_P2P = 3,
    ACL_MEM_MALLOC_HUGE_ONLY_P2P = 4,
    ACL_MEM_MALLOC_NORMAL_ONLY_P2P = 5
} aclrtMemMallocPolicy;

typedef enum {
    ACL_OPT_DETERMINISTIC = 0,
    ACL_OPT_ENABLE_DEBUG_KERNEL = 1,
    ACL_OPT_STRONG_CONSISTENCY = 2
} aclSysParamOpt;

typedef enum { ACL_DDR_MEM = 0, ACL_HBM_MEM = 1 } aclrtMemAttr;
typedef enum { ACL_DEVICE = 0, ACL_HOST = 1 } aclrtRunMode;

typedef enum {
    ACL_EVENT_STATUS_COMPLETE = 0,
    ACL_EVENT_STATUS_NOT_READY = 1,
    ACL_EVENT_STATUS_RESERVED = 2
} aclrtEventStatus;

typedef enum {
    ACL_EVENT_RECORDED_STATUS_NOT_READY = 0,
    ACL_EVENT_RECORDED_STATUS_COMPLETE = 1
} aclrtEventRecordedStatus;

typedef enum {
    ACL_STREAM_STATUS_COMPLETE = 0,
    ACL_STREAM_STATUS_NOT_READY = 1
} aclrtStreamStatus;

ACL_API aclError aclInit(const char *configPath);
ACL_API aclError aclFinalize(void);

/* The last error text of this thread, which is then forgotten; null when there is none. Good until the next call. */
ACL_API const char *aclGetRecentErrMsg(void);
ACL_API aclError aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion);

/* Devices and contexts */
ACL_API aclError aclrtSetDevice(int32_t deviceId);
ACL_API aclError aclrtResetDevice(int32_t deviceId);
ACL_API aclError aclrtGetDevice(int32_t *deviceId);
ACL_API aclError aclrtGetDeviceCount(uint32_t *count);
ACL_API aclError aclrtGetRunMode(aclrtRunMode *runMode);
ACL_API aclError aclrtSynchronizeDevice(void);
ACL_API aclError aclrtCreateContext(aclrtContext *context, int32_t deviceId);
ACL_API aclError aclrtDestroyContext(aclrtContext context);
ACL_API aclError aclrtSetCurrentContext(aclrtContext context);
ACL_API aclError aclrtGetCurrentContext(aclrtContext *context);

/* System parameters: of the process, and of the current context */
ACL_API aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t value);
ACL_API aclError aclrtGetSysParamOpt(aclSysParamOpt opt, int64_t *value);
ACL_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value);
ACL_API aclError aclrtCtxGetSysParamOpt(aclSysParamOpt opt, int64_t *value);

/* Memory */
ACL_API aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy);
ACL_API aclError aclrtFree(void *devPtr);
ACL_API aclError aclrtMallocHost(void **hostPtr, size_t size);
ACL_API aclError aclrtFreeHost(void *hostPtr);
ACL_API aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind);
ACL_API aclError aclrtMemcpyAsync(
    void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind, aclrtStream stream);
ACL_API aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count);
ACL_API aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream);
ACL_API aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total);

/* Streams */
ACL_API aclError aclrtCreateStream(aclrtStream *stream);
ACL_API aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag);
ACL_API aclError aclrtDestroyStream(aclrtStream stream);
ACL_API aclError aclrtSynchronizeStream(aclrtStream stream);
ACL_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout);
ACL_API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status);
ACL_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);

/* Events */
ACL_API aclError aclrtCreateEvent(aclrtEvent *event);
ACL_API aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag);
ACL_API aclError aclrtDestroyEvent(aclrtEvent event);
ACL_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
ACL_API aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream);
ACL_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status);
ACL_API aclError aclrtSynchronizeEvent(aclrtEvent event);
ACL_API aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent);

#ifdef __cplusplus
}
#endif

#endif
