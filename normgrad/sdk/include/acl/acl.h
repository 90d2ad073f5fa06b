/* The runtime, whole. Part of normgrad, an independent implementation of the interface. */
#ifndef NORMGRAD_ACL_H
#define NORMGRAD_ACL_H

#include "acl/acl_base.h"
#include "acl/acl_rt.h"

#endif
