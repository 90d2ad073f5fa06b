/* Tensors, scalars, arrays and executors: opaque handles. Part of normgrad. */
#ifndef NORMGRAD_ACL_META_H
#define NORMGRAD_ACL_META_H

#include "acl/acl_base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t aclnnStatus;
typedef struct aclTensor aclTensor;
typedef struct aclScalar aclScalar;
typedef struct aclIntArray aclIntArray;
typedef struct aclFloatArray aclFloatArray;
typedef struct aclBoolArray aclBoolArray;
typedef struct aclTensorList aclTensorList;
typedef struct aclScalarList aclScalarList;
typedef struct aclOpExecutor aclOpExecutor;

#ifdef __cplusplus
constexpr aclnnStatus OK = 0;
#endif

#define ACLNN_SUCCESS 0
#define ACLNN_ERR_PARAM_NULLPTR 161001
#define ACLNN_ERR_PARAM_INVALID 161002
#define ACLNN_ERR_RUNTIME_ERROR 361001
#define ACLNN_ERR_INNER 561000
#define ACLNN_ERR_INNER_FIND_KERNEL_ERROR 561003
#define ACLNN_ERR_INNER_CREATE_EXECUTOR 561101
#define ACLNN_ERR_INNER_NULLPTR 561103

/* Makers copy what they are given. A null result has an error text. Null strides stand for contiguous ones. */
ACL_API aclTensor *aclCreateTensor(
    const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t *stride, int64_t offset,
    aclFormat format, const int64_t *storageDims, uint64_t storageDimsNum, void *tensorData);
ACL_API aclScalar *aclCreateScalar(void *value, aclDataType dataType);
ACL_API aclIntArray *aclCreateIntArray(const int64_t *value, uint64_t size);
ACL_API aclFloatArray *aclCreateFloatArray(const float *value, uint64_t size);
ACL_API aclBoolArray *aclCreateBoolArray(const bool *value, uint64_t size);

/* A list owns its elements: they are destroyed with it. */
ACL_API aclTensorList *aclCreateTensorList(const aclTensor *const *value, uint64_t size);
ACL_API aclScalarList *aclCreateScalarList(const aclScalar *const *value, uint64_t size);

ACL_API aclnnStatus aclDestroyTensor(const aclTensor *tensor);
ACL_API aclnnStatus aclDestroyScalar(const aclScalar *scalar);
ACL_API aclnnStatus aclDestroyIntArray(const aclIntArray *array);
ACL_API aclnnStatus aclDestroyFloatArray(const aclFloatArray *array);
ACL_API aclnnStatus aclDestroyBoolArray(const aclBoolArray *array);
ACL_API aclnnStatus aclDestroyTensorList(const aclTensorList *array);
ACL_API aclnnStatus aclDestroyScalarList(const aclScalarList *array);

/* The caller frees shapes and strides with delete[]. */
ACL_API aclnnStatus aclGetViewShape(const aclTensor *tensor, int64_t **viewDims, uint64_t *viewDimsNum);
ACL_API aclnnStatus aclGetStorageShape(const aclTensor *tensor, int64_t **storageDims, uint64_t *storageDimsNum);
ACL_API aclnnStatus aclGetViewStrides(const aclTensor *tensor, int64_t **stridesValue, uint64_t *stridesNum);
ACL_API aclnnStatus aclGetViewOffset(const aclTensor *tensor, int64_t *offset);
ACL_API aclnnStatus aclGetFormat(const aclTensor *tensor, aclFormat *format);
ACL_API aclnnStatus aclGetDataType(const aclTensor *tensor, aclDataType *dataType);
ACL_API aclnnStatus aclGetIntArraySize(const aclIntArray *array, uint64_t *size);
ACL_API aclnnStatus aclGetFloatArraySize(const aclFloatArray *array, uint64_t *size);
ACL_API aclnnStatus aclGetBoolArraySize(const aclBoolArray *array, uint64_t *size);
ACL_API aclnnStatus aclGetTensorListSize(const aclTensorList *tensorList, uint64_t *size);
ACL_API aclnnStatus aclGetScalarListSize(const aclScalarList *scalarList, uint64_t *size);

ACL_API aclnnStatus aclSetRawTensorAddr(aclTensor *tensor, void *addr);
ACL_API aclnnStatus aclGetRawTensorAddr(const aclTensor *tensor, void **addr);

/* Executors. An index counts the operator's tensors in the order of its parameters, absent ones included. */
ACL_API aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *executor);
ACL_API aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *executor);
ACL_API aclnnStatus aclSetInputTensorAddr(aclOpExecutor *executor, const size_t index, aclTensor *tensor, void *addr);
ACL_API aclnnStatus aclSetOutputTensorAddr(aclOpExecutor *executor, const size_t index, aclTensor *tensor, void *addr);
ACL_API aclnnStatus aclSetTensorAddr(aclOpExecutor *executor, const size_t index, aclTensor *tensor, void *addr);

#ifdef __cplusplus
}
#endif

#endif
