#!/usr/bin/env python3
"""Make empty stand-ins for the CUDA shared libraries that PyPI's torch wheel links to, so that a CPU-only
use of torch needs none of the nvidia-* wheels.  usage: make_stubs.py SITE_PACKAGES"""
import subprocess, sys, os, re, collections, tempfile
lib = os.path.join(sys.argv[1], "torch", "lib")
work = tempfile.mkdtemp()
STUB = re.compile(r"^lib(cu|nccl|nvrtc|nvshmem_host|nvjitlink)\w*\.so\.\d+$", re.I)
for f in os.listdir(lib):
    if STUB.match(f): os.remove(os.path.join(lib, f))      # stubs of an earlier run
have = set(os.listdir(lib))
verfile = {}
needed, und = set(), collections.defaultdict(set)
unv = set(); defined=set()
SYS = re.compile(r"^(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux-x86-64|libgomp|libgfortran|libquadmath|libz)\.so")
for f in sorted(have):
    if ".so" not in f or not os.path.isfile(os.path.join(lib,f)): continue
    p = os.path.join(lib, f)
    for m in re.findall(r"NEEDED.*\[(.*?)\]", subprocess.run(["readelf","-d",p],capture_output=True,text=True).stdout):
        if m not in have and not SYS.match(m): needed.add(m)
    cur = None
    for line in subprocess.run(["readelf","-V","-W",p],capture_output=True,text=True).stdout.splitlines():
        m = re.search(r"File: (\S+)", line)
        if m: cur = m.group(1); continue
        m = re.search(r"Name: (\S+)\s+Flags", line)
        if m and cur: verfile[m.group(1)] = cur
    for line in subprocess.run(["nm","-D",p],capture_output=True,text=True).stdout.splitlines():
        m = re.match(r"^\s*([0-9a-f]*)\s+([A-Za-z])\s+(\S+)$", line)
        if not m: continue
        _, t, s = m.groups()
        if t in "Uwv":
            if "@" in s:
                n, v = s.split("@",1); v=v.lstrip("@"); und[v].add(n)
            else: unv.add(s)
        else: defined.add(s.split("@")[0])
unv -= defined
PREF = {"libnccl":"nccl","libcufile":"cuFile","libcusparseLt":"cusparseLt","libcupti":"cupti","libnvshmem_host":"nvshmem",
        "libcusolver":"cusolver","libcudart":"cuda","libcublas":"cublas","libcudnn":"cudnn","libnvrtc":"nvrtc","libcufft":"cufft","libcusparse":"cusparse"}
print("needed:", sorted(needed))
for so in sorted(needed):
    base = so.split(".so")[0]
    syms_v = und.get(so, set())
    # version node named after the soname, else any node whose name starts like the lib
    nodes = {k: v for k, v in und.items() if verfile.get(k) == so}
    pref = PREF.get(base, base[3:])
    extra = {s for s in unv if s.startswith(pref) or s.startswith("_"+pref)}
    c = os.path.join(work, base + ".c"); vs = os.path.join(work, base + ".map")
    allsyms = set().union(*nodes.values()) if nodes else set()
    with open(c,"w") as o:
        SPECIAL = {"cudaGetDeviceCount": "int cudaGetDeviceCount(int*n){*n=0;return 100;}\n",
                   "cudaStreamIsCapturing": "int cudaStreamIsCapturing(void*s,int*st){*st=0;return 0;}\n",
                   "cudaGetLastError": "int cudaGetLastError(void){return 0;}\n", "cudaPeekAtLastError": "int cudaPeekAtLastError(void){return 0;}\n",
                   "cudaDriverGetVersion": "int cudaDriverGetVersion(int*v){*v=0;return 0;}\n", "cudaRuntimeGetVersion": "int cudaRuntimeGetVersion(int*v){*v=0;return 0;}\n"}
        for s in sorted(allsyms|extra):
            if s in SPECIAL: o.write(SPECIAL[s])
            elif s.endswith(("ErrorString", "ErrorName", "GetErrorString", "StatusName", "StatusString", "LastErrorString")): o.write(f'const char* {s}(void){{return "no CUDA here (stub)";}}\n')
            else: o.write(f"long {s}(void){{return 999;}}\n" if not s.startswith("__cuda") else f"void* {s}(void){{static long x[8];return x;}}\n")
    args = ["gcc","-shared","-fPIC","-w","-fno-builtin","-O1","-o",os.path.join(lib,so),"-Wl,-soname,"+so,c]
    if nodes:
        with open(vs,"w") as o:
            for k,v in nodes.items(): o.write(f"{k} {{ global: "+" ".join(x+";" for x in sorted(v))+" };\n")
        args.append("-Wl,--version-script="+vs)
    r = subprocess.run(args,capture_output=True,text=True)
    print(so, len(allsyms), len(extra), list(nodes), r.returncode, r.stderr[:300])
