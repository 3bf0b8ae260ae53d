export { PROBE_COMMAND } from "./child.ts";
export { answerProbe, type ProbeEvent, type ProbeRequest } from "./probe.ts";
export {
  type Check,
  type CheckStatus,
  type DoctorOptions,
  type DoctorReport,
  examine,
  isWrongUsage,
  reportOf,
} from "./doctor.ts";
