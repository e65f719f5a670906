/* A CUDA runtime and driver without a card, for tests/traced.py: one H100 by name, streams and events that are always
   ready, no memory.  Built as libcuda.so.1 and preloaded, it answers what PyTorch asks before it looks at a tensor; any
   other call goes to the real runtime and fails there, so that nothing is computed by accident. */
#include <cuda_runtime_api.h>
#include <string.h>

#define ANSWERS(name, args, ...) cudaError_t name args { __VA_ARGS__; return cudaSuccess; }
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}

static int done(void) { return 0; }

static void describe(struct cudaDeviceProp *p) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100, not there");
    p->major = 9;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->regsPerMultiprocessor = 65536;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472;
    p->l2CacheSize = 50 << 20;
    p->totalGlobalMem = 80000000000;
}

/* the device */
ANSWERS(cudaGetDeviceCount, (int *n), *n = 1)
ANSWERS(cudaGetDevice, (int *device), *device = 0)
ANSWERS(cudaSetDevice, (int device), (void)device)
ANSWERS(cudaGetDeviceProperties, (struct cudaDeviceProp *p, int device), describe(p))
ANSWERS(cudaDeviceGetAttribute, (int *value, enum cudaDeviceAttr which, int device), *value = 0)
ANSWERS(cudaDeviceGetPCIBusId, (char *id, int size, int device), strcpy(id, "0000:00:00.0"))
ANSWERS(cudaDeviceCanAccessPeer, (int *can, int device, int peer), *can = 0)
ANSWERS(cudaDeviceSynchronize, (void), (void)0)
ANSWERS(cudaMemGetInfo, (size_t *unused, size_t *all), *unused = *all = 80000000000)
ANSWERS(cudaFree, (void *p), (void)p)
ANSWERS(cudaDriverGetVersion, (int *version), *version = CUDART_VERSION)
ANSWERS(cudaRuntimeGetVersion, (int *version), *version = CUDART_VERSION)
ANSWERS(cudaGetLastError, (void), (void)0)
ANSWERS(cudaPeekAtLastError, (void), (void)0)
ANSWERS(cudaGetDriverEntryPointByVersion, (const char *name, void **function, unsigned version,
        unsigned long long flags, enum cudaDriverEntryPointQueryResult *found),
        *function = strstr(name, "PrimaryCtxGetState") ? (void *)cuDevicePrimaryCtxGetState : (void *)done;
        if (found) *found = cudaDriverEntryPointSuccess)

/* streams and events */
static long streams = 16;
ANSWERS(cudaStreamCreateWithPriority, (cudaStream_t *s, unsigned flags, int priority), *s = (cudaStream_t)streams++)
ANSWERS(cudaStreamGetPriority, (cudaStream_t s, int *priority), *priority = 0)
ANSWERS(cudaDeviceGetStreamPriorityRange, (int *low, int *high), *low = 0; *high = -5)
ANSWERS(cudaStreamIsCapturing, (cudaStream_t s, enum cudaStreamCaptureStatus *how), *how = cudaStreamCaptureStatusNone)
ANSWERS(cudaStreamGetCaptureInfo, (cudaStream_t s, enum cudaStreamCaptureStatus *how, unsigned long long *id,
        cudaGraph_t *graph, const cudaGraphNode_t **before, const cudaGraphEdgeData **edges, size_t *n),
        *how = cudaStreamCaptureStatusNone)
ANSWERS(cudaThreadExchangeStreamCaptureMode, (enum cudaStreamCaptureMode *mode), (void)mode)
ANSWERS(cudaStreamQuery, (cudaStream_t s), (void)s)
ANSWERS(cudaStreamSynchronize, (cudaStream_t s), (void)s)
ANSWERS(cudaStreamWaitEvent, (cudaStream_t s, cudaEvent_t e, unsigned flags), (void)s)
ANSWERS(cudaEventCreateWithFlags, (cudaEvent_t *e, unsigned flags), *e = (cudaEvent_t)1)
ANSWERS(cudaEventRecord, (cudaEvent_t e, cudaStream_t s), (void)s)
ANSWERS(cudaEventRecordWithFlags, (cudaEvent_t e, cudaStream_t s, unsigned flags), (void)s)
ANSWERS(cudaEventQuery, (cudaEvent_t e), (void)e)
ANSWERS(cudaEventDestroy, (cudaEvent_t e), (void)e)
