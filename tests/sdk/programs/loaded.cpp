// Loads the library when it runs, by any of its names, uses it, closes it and uses it again.
#include <dlfcn.h>

#include <cstdio>

#include "acl/acl.h"

int main(int count, char **names)
{
    for (int i = 1; i < count; i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            std::printf("%s\n", dlerror());
            return 1;
        }
        aclError (*set)(int32_t) = reinterpret_cast<aclError (*)(int32_t)>(dlsym(library, "aclrtSetDevice"));
        aclError (*take)(void **, size_t, aclrtMemMallocPolicy) =
            reinterpret_cast<aclError (*)(void **, size_t, aclrtMemMallocPolicy)>(dlsym(library, "aclrtMalloc"));
        aclError (*give)(void *) = reinterpret_cast<aclError (*)(void *)>(dlsym(library, "aclrtFree"));
        void *run = dlsym(library, "aclnnLayerNormBackward");
        void *data = nullptr;
        if (!run || set(0) != 0 || take(&data, 64, ACL_MEM_MALLOC_HUGE_FIRST) != 0 || give(data) != 0)
            return 2;
        dlclose(library);
    }
    std::printf("used %d\n", count - 1);
    return 0;
}
