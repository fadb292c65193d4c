# Environment of a careful ROCm run; source it before Python starts: HIP reads its variables when torch is imported.
# Not run by us: no ROCm machine was at hand. Values are those of AMD's Primus and of RCCL's reference (docs/mi300x.md).
# Whatever is set already stays. `draftsmith doctor` compares an environment with these tables.
#
# Container, on the host (one node; several nodes need --network host, and --device=/dev/infiniband for RDMA):
#   docker run -it --device=/dev/kfd --device=/dev/dri --group-add video --ipc=host --shm-size 64g \
#     --cap-add SYS_PTRACE --security-opt seccomp=unconfined --ulimit memlock=-1 --ulimit nofile=1048576:1048576 \
#     -v "$PWD":/work -w /work rocm/primus:v26.8 bash
#   make test                                   inside: installs beside the image's torch and leaves that torch alone
# Take an image built for the GPUs at hand (gfx942: MI300X, MI325X; gfx950: MI350X, MI355X): the tag bakes it in.

default() { if [ -z "${!1:-}" ]; then export "$1=$2"; fi; }  # NAME VALUE

# -- which GPUs ------------------------------------------------------------------------------------------------------
default HIP_VISIBLE_DEVICES 0,1,2,3,4,5,6,7                 # the one list; ROCR_VISIBLE_DEVICES would filter before it
default CUDA_VISIBLE_DEVICES "$HIP_VISIBLE_DEVICES"         # tools that look only there must see the same GPUs

# -- one node --------------------------------------------------------------------------------------------------------
default HSA_NO_SCRATCH_RECLAIM 1                            # MEC firmware below 177 stalls as it takes scratch back
default GPU_MAX_HW_QUEUES 2                                 # as Primus and InferenceX set it; neither says why
default HSA_ENABLE_SDMA 1                                   # copies by the DMA engines, beside the compute units
default NCCL_MIN_NCHANNELS 112                              # all 8 GPUs of an MI300X node in one collective
default TORCH_NCCL_HIGH_PRIORITY 1                          # reductions overtake the kernels of backward
default RCCL_MSCCL_ENABLE 0                                 # no surprise algorithms in training (Primus)
default RCCL_MSCCLPP_ENABLE 0                               # likewise
default NCCL_CHECKS_DISABLE 1                               # argument checks cost time; set 0 while debugging
default TORCH_BLAS_PREFER_HIPBLASLT 1                       # bf16 products; 0 is the diagnosis when one takes 600 ms
default PYTORCH_TUNABLEOP_ENABLED 0                         # steps have many lengths, so tuning would never end
default OMP_NUM_THREADS 8                                   # cores / ranks; the default is all cores for every rank
default TRITON_CACHE_DIR "/tmp/triton-${SLURM_JOB_ID:-$(id -u)}"  # local disk: nodes must not write
default TORCHINDUCTOR_CACHE_DIR "/tmp/inductor-${SLURM_JOB_ID:-$(id -u)}"  # the same file on a shared one

# gfx950 alone: RCCL's WarpSpeed gave NaN there (Primus 1178). DRAFTSMITH_GPU=gfx950 says so.
if [ "${DRAFTSMITH_GPU:-}" = gfx950 ]; then default RCCL_WARP_SPEED_AUTO 0; fi

# -- several nodes: DRAFTSMITH_FABRIC=roce (InfiniBand, Broadcom or CX7 RoCE) or ainic (AMD Pollara 400) --------------
if [ -n "${DRAFTSMITH_FABRIC:-}" ]; then
  default NCCL_SOCKET_IFNAME "^docker0,lo"                  # better: the one interface that all nodes reach
  default GLOO_SOCKET_IFNAME "$NCCL_SOCKET_IFNAME"          # gloo would choose another one by itself
  default NCCL_IB_ROCE_VERSION_NUM 2                        # RoCE v2, which switches route
  default NCCL_CROSS_NIC 0                                  # a rank stays on its own rail
  default NCCL_P2P_NET_CHUNKSIZE 524288                     # larger messages between nodes (Primus)
  case $DRAFTSMITH_FABRIC in
    roce)
      default NCCL_IB_GID_INDEX 3                           # sites differ, often 1 for RoCE v2: look at show_gids
      default NCCL_PXN_DISABLE 1                            # saves GPU memory
      ;;
    ainic)
      default NCCL_IB_GID_INDEX 1                           # Primus's value, no reason given
      default NCCL_IB_TC 104                                # traffic class of the data: the switch must know it
      default NCCL_IB_FIFO_TC 192                           # and of the control messages
      default NCCL_IB_SL 0                                  # Primus's value, no reason given
      default NCCL_IB_QPS_PER_CONNECTION 1                  # Primus's value, no reason given
      default NCCL_PXN_DISABLE 0                            # Primus's value, no reason given
      default RCCL_AINIC_ROCE 1                             # ROCm 7.2.1 and newer: the plugin is built into RCCL
      default NCCL_NET_PLUGIN none                          # older ROCm: librccl-anp.so, and leave RCCL_AINIC_ROCE out
      default NCCL_DMABUF_ENABLE 0                          # Primus's value, no reason given
      default NCCL_GDR_FLUSH_DISABLE 1                      # Primus's value, no reason given
      default NCCL_IGNORE_CPU_AFFINITY 1                    # Primus's value, no reason given
      default NCCL_IB_USE_INLINE 1                          # Primus's value, no reason given
      default NCCL_MAX_P2P_CHANNELS 56                      # Primus's value, no reason given
      default RCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING 0  # Primus's value, no reason given
      ;;
    *) echo "DRAFTSMITH_FABRIC=$DRAFTSMITH_FABRIC: expected roce or ainic" >&2; return 1 2>/dev/null || exit 1 ;;
  esac
fi
unset -f default
