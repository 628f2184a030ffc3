"""Lines of real NCCL logs, with neutral hosts and addresses; the source of each log is above it.

Where no complete log of a version was available, lines from several logs of that version are combined.
"""

# Source: https://github.com/NVIDIA/nccl/issues/527
NCCL_2_12_EFA = """
a:417138:417138 [7] NCCL INFO Bootstrap : Using ens32:10.0.0.1<0>
a:417138:417138 [7] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v6 symbol.
a:417138:417138 [7] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin symbol (v4 or v5).
a:417138:417176 [7] NCCL INFO NET/OFI Using aws-ofi-nccl 1.4.0aws
a:417138:417176 [7] NCCL INFO NET/OFI Selected Provider is efa
a:417138:417176 [7] NCCL INFO Using network AWS Libfabric
a:417138:417179 [3] NCCL INFO Channel 00/0 : 11[201d0] -> 18[201c0] [send] via NET/AWS Libfabric/0/GDRDMA
a:417138:417177 [0] NCCL INFO Channel 01 : 8[101c0] -> 15[a01d0] via P2P/IPC/read
"""
# Source: https://github.com/NVIDIA/nccl/issues/988
NCCL_2_12_HPCX = """
a:28331:28331 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
a:28331:28331 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin_v5 symbol.
a:28331:28331 [0] NCCL INFO Plugin Path : /opt/hpcx/nccl_rdma_sharp_plugin/lib/libnccl-net.so
a:28331:28331 [0] NCCL INFO P2P plugin IBext
a:28331:28331 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP ; OOB eth0:10.0.0.1<0>
a:28331:28331 [0] NCCL INFO Using network IBext
NCCL version 2.12.9+cuda11.6
"""
# Source: https://github.com/NVIDIA/nccl/issues/1052, https://github.com/NVIDIA/nccl/issues/707
NCCL_2_18_ROCE = """
a:14159:14159 [0] NCCL INFO Bootstrap : Using enp24s0np0:10.0.0.1<0>
a:14159:14159 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared \
object file: No such file or directory
a:14159:14159 [0] NCCL INFO NET/Plugin : No plugin found, using internal implementation
NCCL version 2.18.5+cuda12.0
a:14159:14168 [0] NCCL INFO NET/IB : Using [0]mlx5_4:1/RoCE [RO]; OOB enp24s0np0:10.0.0.1<0>
a:14159:14168 [0] NCCL INFO Using network IB
a:14159:14168 [0] NCCL INFO Channel 01 : 2[c7000] -> 0[87000] [receive] via NET/IB/5/GDRDMA
a:14159:14168 [0] NCCL INFO Channel 01 : 0[87000] -> 2[c7000] [send] via NET/IB/5/GDRDMA
"""
# Source: https://github.com/NVIDIA/nccl/issues/1267, https://github.com/NVIDIA/nccl/issues/1232
NCCL_2_19_SOCKET = """
a:2744870:2744870 [0] NCCL INFO Bootstrap : Using ens7:10.0.0.1<0>
a:2744870:2744870 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin symbol (>= v5). ncclNetPlugin symbols v4 and \
lower are not supported.
NCCL version 2.19.3+cuda12.3
a:2744870:2745046 [0] NCCL INFO NET/IB : No device found.
a:2744870:2745046 [0] NCCL INFO NET/Socket : Using [0]ens7:10.0.0.1<0>
a:2744870:2745046 [0] NCCL INFO Using non-device net plugin version 0
a:2744870:2745046 [0] NCCL INFO Using network Socket
a:2744870:2745046 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
a:2744870:2745046 [0] NCCL INFO Channel 00 : 2[1] -> 0[0] via SHM/direct/direct
"""
# Source: https://github.com/aws/aws-ofi-nccl/issues/801; the last line by the format in NCCL's src/transport/net.cc
NCCL_2_20_SLINGSHOT = """
 libfabric:507357:1741146011::cxi:fabric:cxip_nic_get_rgroup_vni():253<warn> : Failed to find valid default rgroup
[0] NCCL INFO NET/OFI Using aws-ofi-nccl 1.6.0
[0] NCCL INFO NET/OFI Selected Provider is cxi (found 8 nics)
[0] NCCL INFO Using non-device net plugin version 0
[0] NCCL INFO Using network AWS Libfabric
[0] NCCL INFO DMA-BUF is available on GPU device 0
[0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/AWS Libfabric/0(3)/GDRDMA(PCI)/Shared
"""
# Source: https://github.com/NVIDIA/nccl/issues/1680
NCCL_2_25_NO_VERBS = """
a:1263644:1263644 [0] NCCL INFO Bootstrap: Using enp3s0f0:10.0.0.1<0>
a:1263644:1263644 [0] NCCL INFO NCCL version 2.25.1+cuda12.8
a:1263644:1263655 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
a:1263644:1263655 [0] NCCL INFO Failed to open libibverbs.so[.1]
a:1263644:1263655 [0] NCCL INFO NET/Socket : Using [0]enp3s0f0:10.0.0.1<0> [1]veth9a:fe80::1%veth9a<0>
a:1263644:1263655 [0] NCCL INFO Using network Socket
"""
# Source: https://github.com/NVIDIA/nccl/issues/1713
NCCL_2_27_SHARED = """
[1,2]<stdout>:a:102986:103025 [0] NCCL INFO Channel 01/1 : 1[1] -> 2[0] [receive] via NET/IB/10/GDRDMA/Shared
[1,2]<stdout>:a:102986:103025 [0] NCCL INFO Channel 00/1 : 2[0] -> 3[1] via P2P/CUMEM
"""
# Source: https://github.com/NVIDIA/nccl/issues/1925
NCCL_2_28 = """
a:3769901:3769901 [1] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
a:3769901:3769901 [1] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
a:3769901:3769901 [1] NCCL INFO Initialized NET plugin IB
a:3769901:3769901 [1] NCCL INFO Assigned NET plugin IB to comm
a:3769901:3769901 [1] NCCL INFO Assigned GIN plugin GIN_IB_GDAKI to comm
a:3769901:3769901 [1] NCCL INFO Using network IB
"""
# Source: https://github.com/aws/aws-ofi-nccl/issues/1055, https://github.com/NVIDIA/nccl/issues/1597
NCCL_2_27_EFA = """
NCCL INFO NET/Plugin: Loaded net plugin Libfabric (v11)
NCCL INFO NET/OFI Selected Provider is efa
NCCL INFO Using network Libfabric
"""
