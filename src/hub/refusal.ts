import { UserError } from "../base/errors.ts";

interface Refusal {
  readonly modelId: string;
  /** Where one of its files was asked for. */
  readonly file?: string;
  readonly response: Response;
  readonly withToken: boolean;
}

/** What an answer of the Hub's that is none of those hoped for means to a user. Its `X-Error-Code` tells most. */
export async function refused({ modelId, file, response, withToken }: Refusal): Promise<UserError> {
  const { status, headers } = response;
  const body = await response.text().catch(() => "");
  const said = headers.get("x-error-message") ?? messageIn(body);
  const heard = `(HTTP ${status}${said ? `: ${said}` : ""})`;
  const refusal = (message: string, hint: string) => new UserError("download", `${message} ${heard}`, hint);

  switch (headers.get("x-error-code")) {
    case "GatedRepo":
      return refusal(
        `${modelId} is open only to people who have accepted its terms`,
        withToken
          ? "accept the terms on the model's page with the account that HF_TOKEN belongs to"
          : "accept the terms on the model's page and set HF_TOKEN to a token of that account",
      );
    case "RevisionNotFound":
      return refusal(`${modelId} has no such revision`, "give a branch, a tag or a commit of it");
    case "EntryNotFound":
      return refusal(`${modelId} has no file ${file ?? "of that name"}`, "choose another revision with --revision");
    case "DisabledRepo":
      return refusal(`${modelId} was disabled on the Hub`, "choose another model");
  }
  if (status === 401 && withToken && /invalid (credentials|user|token)/i.test(said)) {
    return refusal("the Hub does not know this token", "set HF_TOKEN to a valid token, or unset it and log out");
  }
  if (status === 401 || status === 403 || status === 404) {
    // The Hub does not say which of the two it is, so as not to tell the names of private models.
    return refusal(
      `the Hub has no model ${modelId}, or none that ${withToken ? "this token" : "anybody without a token"} may see`,
      withToken
        ? "check the spelling (org/name), and that HF_TOKEN is valid and may read it"
        : "check the spelling (org/name); for a private model set HF_TOKEN",
    );
  }
  return refusal(`the Hub cannot serve ${modelId}`, "try again later");
}

/** The Hub, or something in front of it, does not speak as a Hub does. */
export const nonsense = (where: string, what: string): UserError =>
  new UserError("download", `the Hub at ${where} gave ${what}`, "check HF_ENDPOINT, and any proxy in between");

function messageIn(body: string): string {
  try {
    const { error } = JSON.parse(body);
    return typeof error === "string" ? error : "";
  } catch {
    return "";
  }
}
