/* How the operators' functions are made visible. Part of normgrad. */
#ifndef NORMGRAD_ACLNN_UTIL_H
#define NORMGRAD_ACLNN_UTIL_H

#define ACLNN_API __attribute__((visibility("default")))

#endif
