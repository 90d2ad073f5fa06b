/* The operators' common base. Part of normgrad. */
#ifndef NORMGRAD_ACLNN_BASE_H
#define NORMGRAD_ACLNN_BASE_H

#include "aclnn/acl_meta.h"

#ifdef __cplusplus
extern "C" {
#endif

ACL_API aclnnStatus aclnnInit(const char *configPath);
ACL_API aclnnStatus aclnnFinalize(void);

#ifdef __cplusplus
}
#endif

#endif
