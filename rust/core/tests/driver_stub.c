// A CUDA driver for tests: contexts per thread, memory and graphs that say on standard output what became of them.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kSuccess = 0, kInvalidContext = 201, kNewerThanAny = 54321 };

static int primary;  // its address is the one context
static __thread void* current;
static void (*retained)(void*);  // the destructor of the object that the graph holds
static void* retained_by;

static int in_context(const char* what) {
    printf("%s %s\n", what, current == &primary ? "in its context" : "without a context");
    fflush(stdout);
    return current == &primary ? kSuccess : kInvalidContext;
}

#define STUB(name, ...) int name(__VA_ARGS__)
#define UNUSED(name) \
    int name(void) { return 999; }

STUB(cuInit, unsigned flags) { return (int)flags; }
STUB(cuDriverGetVersion, int* version) { return *version = 13000, kSuccess; }
STUB(cuDeviceGet, int* device, int ordinal) { return *device = ordinal, kSuccess; }
STUB(cuDeviceGetCount, int* count) { return *count = 1, kSuccess; }
STUB(cuDeviceGetAttribute, int* value, int attribute, int device) {
    (void)attribute, (void)device;
    return *value = 9, kSuccess;
}
STUB(cuDevicePrimaryCtxRetain, void** context, int device) { return (void)device, *context = &primary, kSuccess; }
STUB(cuCtxGetCurrent, void** context) { return *context = current, kSuccess; }
STUB(cuCtxSetCurrent, void* context) { return current = context, kSuccess; }
STUB(cuGetErrorString, unsigned error, const char** text) {
    return *text = error == kInvalidContext ? "invalid device context" : NULL, error == kInvalidContext ? kSuccess : 1;
}
STUB(cuMemAlloc_v2, uint64_t* address, size_t bytes) {
    if (getenv("STUB_ALLOC_FAILS")) return kNewerThanAny;
    *address = (uint64_t)(uintptr_t)malloc(bytes);
    return in_context("allocated");
}
STUB(cuMemFree_v2, uint64_t address) {
    if (current == &primary) free((void*)(uintptr_t)address);
    return in_context("freed");
}
STUB(cuMemsetD8Async, uint64_t address, unsigned char value, size_t bytes, void* stream) {
    (void)stream;
    memset((void*)(uintptr_t)address, value, bytes);
    return kSuccess;
}
STUB(cuStreamCreate, void** stream, unsigned flags) { return (void)flags, *stream = &primary, kSuccess; }
STUB(cuStreamBeginCapture_v2, void* stream, int mode) { return (void)stream, (void)mode, kSuccess; }
STUB(cuStreamEndCapture, void* stream, void** graph) { return (void)stream, *graph = &primary, kSuccess; }
STUB(cuStreamIsCapturing, void* stream, unsigned* status) { return (void)stream, *status = 0, kSuccess; }
STUB(cuGraphInstantiateWithFlags, void** exec, void* graph, unsigned long long flags) {
    return (void)graph, (void)flags, *exec = &primary, kSuccess;
}
STUB(cuGraphDestroy, void* graph) { return (void)graph, kSuccess; }
STUB(cuGraphExecDestroy, void* exec) {
    (void)exec;
    if (retained) retained(retained_by);
    retained = NULL;
    return in_context("destroyed");
}
STUB(cuStreamGetCaptureInfo_v2, void* stream, unsigned* status, unsigned long long* id, void** graph, const void** nodes,
     size_t* count) {
    (void)stream;
    *id = *count = 0, *nodes = NULL, *graph = &primary;
    return *status = 1, kSuccess;
}
STUB(cuUserObjectCreate, void** object, void* data, void (*end)(void*), unsigned references, unsigned flags) {
    (void)flags;
    retained = end, retained_by = data, *object = &primary;
    return references == 1 ? kSuccess : 1;
}
STUB(cuUserObjectRelease, void* object, unsigned count) {
    (void)object, (void)count;
    retained(retained_by);
    return retained = NULL, kSuccess;
}
STUB(cuGraphRetainUserObject, void* graph, void* object, unsigned count, unsigned flags) {
    (void)graph, (void)object, (void)count, (void)flags;
    return getenv("STUB_RETAIN_FAILS") ? kNewerThanAny : kSuccess;
}

UNUSED(cuEventCreate)
UNUSED(cuEventDestroy_v2)
UNUSED(cuEventRecord)
UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncGetParamInfo)
UNUSED(cuFuncSetAttribute)
UNUSED(cuGraphGetEdges)
UNUSED(cuGraphGetNodes)
UNUSED(cuGraphKernelNodeGetAttribute)
UNUSED(cuGraphKernelNodeGetParams_v2)
UNUSED(cuGraphLaunch)
UNUSED(cuGraphMemsetNodeGetParams)
UNUSED(cuGraphNodeGetType)
UNUSED(cuKernelGetFunction)
UNUSED(cuKernelGetParamInfo)
UNUSED(cuLaunchKernelEx)
UNUSED(cuLibraryGetGlobal)
UNUSED(cuLibraryGetKernel)
UNUSED(cuLibraryLoadData)
UNUSED(cuMemsetD32Async)
UNUSED(cuPointerGetAttribute)
UNUSED(cuStreamSynchronize)
UNUSED(cuStreamWaitEvent)
UNUSED(cuTensorMapEncodeTiled)
